"""The model as an engine computes it: one lane of a tensor-parallel group, projections fused, weights packed or in fp8.

`for_engine` takes a finished Transformer and swaps its linears; the forward pass stays the one in model.py, free of ranks. It
returns where each parameter of the learner lands in the new tensors (the Layout that transfer.py plans with), so an actor receives
its own slices and nothing else.

Column-parallel (Megatron-LM, arXiv 1909.08053): q, k, v, gate, up split by output rows, no communication. Row-parallel: o and
down split by input columns, one all-reduce of [T, E] each, so 2 L all-reduces a forward: of a 70B at batch 128 in bf16 160 x 2.1
MB. Embedding and head split by vocabulary: one all-reduce in front, one all-gather of logits behind, after which every lane holds
the same bits and samples the same token from the same uniform number. Norms and the biases behind an all-reduce are whole on
every lane. With more lanes than KV heads, lanes share one: rank t holds KV head t x K // lanes.

What is multiplied with may be a derived copy of the live weight: oneDNN's blocked layout on a CPU (at 128 rows of SmolLM2's shapes
1.6 times as fast as the plain one), e4m3 with block scales on a GPU. Derived copies are made anew by `refresh()` after each proof.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from config import ConfigError
from kernels.fp8_linear import fp8_linear, quantise
from shape import Shape
from transfer import Landing, Layout, shard_rows


@dataclass(slots=True)
class Lane:
    """This rank's place in its engine. `group` is set once process groups exist; weights need only rank and size."""
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def gather_columns(self, x_RV: Tensor, columns: int) -> Tensor:
        """Every lane's columns side by side. A lane's are ceil(columns / size), the last lane's may be fewer."""
        if self.size == 1:
            return x_RV
        width = -(-columns // self.size)
        mine = F.pad(x_RV, (0, width - x_RV.shape[1])).contiguous()
        parts = mine.new_empty(self.size, *mine.shape)
        dist.all_gather(list(parts), mine, group=self.group)
        return parts.transpose(0, 1).flatten(1)[:, :columns]


def check_lanes(shape: Shape, lanes: int) -> None:
    """Refuse a tensor parallelism that does not divide the model. Raises ConfigError."""
    for name, size in (("num_attention_heads", shape.heads), ("intermediate_size", shape.ffn)):
        if size % lanes:
            raise ConfigError(f"`actor.tp` = {lanes} does not divide config.json's {name} = {size}; choose one that does")
    if shape.kv_heads % lanes and lanes % shape.kv_heads:
        raise ConfigError(f"`actor.tp` = {lanes} neither divides nor is a multiple of num_key_value_heads = {shape.kv_heads}")
    if shard_rows(shape.vocab, lanes, lanes - 1)[0] == shape.vocab:
        raise ConfigError(f"`actor.tp` = {lanes}: a vocabulary of {shape.vocab} leaves a rank without rows")


def lane_slices(shape: Shape, rank: int, lanes: int) -> dict[str, tuple[int, int]]:
    """[first, last) of what a lane holds of each sliced dimension: query and KV columns, ffn, vocabulary."""
    D, queries = shape.head_dim, shape.heads // lanes
    kv_heads = max(1, shape.kv_heads // lanes)
    kv_first = rank * shape.kv_heads // lanes
    return {"q": (rank * queries * D, (rank + 1) * queries * D), "kv": (kv_first * D, (kv_first + kv_heads) * D),
            "ffn": (rank * shape.ffn // lanes, (rank + 1) * shape.ffn // lanes), "vocab": shard_rows(shape.vocab, lanes, rank)}


def lane_layout(shape: Shape, rank: int, lanes: int) -> Layout:
    """Where every parameter of the learner lands in this lane's fused tensors."""
    cut, E = lane_slices(shape, rank, lanes), shape.hidden
    layout: Layout = {}

    def rows(name: str, piece: tuple[int, int], columns: int, tensor: str = "", at: int = 0) -> None:
        layout[name] = (Landing(*piece, 0, columns, tensor or name, at, 0),)

    def columns(name: str, piece: tuple[int, int], height: int) -> None:
        layout[name] = (Landing(0, height, *piece, name, 0, 0),)

    rows("model.embed_tokens.weight", cut["vocab"], E)
    rows("model.norm.weight", (0, E), 1)
    if not shape.tied:
        rows("lm_head.weight", cut["vocab"], E)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        rows(at + "input_layernorm.weight", (0, E), 1)
        rows(at + "post_attention_layernorm.weight", (0, E), 1)
        done = 0
        for part, piece in (("q", cut["q"]), ("k", cut["kv"]), ("v", cut["kv"])):
            rows(f"{at}self_attn.{part}_proj.weight", piece, E, f"{at}self_attn.qkv_proj.weight", done)
            if shape.qkv_bias:
                rows(f"{at}self_attn.{part}_proj.bias", piece, 1, f"{at}self_attn.qkv_proj.bias", done)
            done += piece[1] - piece[0]
        columns(f"{at}self_attn.o_proj.weight", cut["q"], E)
        if shape.o_bias:
            rows(f"{at}self_attn.o_proj.bias", (0, E), 1)
        for part in ("q", "k") if shape.qk_norm else ():
            rows(f"{at}self_attn.{part}_norm.weight", (0, shape.head_dim), 1)
        ffn = cut["ffn"][1] - cut["ffn"][0]
        rows(at + "mlp.gate_proj.weight", cut["ffn"], E, at + "mlp.gate_up_proj.weight", 0)
        rows(at + "mlp.up_proj.weight", cut["ffn"], E, at + "mlp.gate_up_proj.weight", ffn)
        columns(at + "mlp.down_proj.weight", cut["ffn"], E)
    return layout


class EngineLinear(nn.Module):
    """`after`(x W^T) + b. The weight is live: publications write into it; what is multiplied with may be derived from it."""

    def __init__(self, size: tuple[int, int], bias: bool, backend: str, after: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size[0]), requires_grad=False) if bias else None
        self.backend, self.after = backend, after
        self.derived: tuple[Tensor, ...] = ()

    def refresh(self) -> None:
        """Derive anew what is multiplied with; in place where a CUDA graph has its address."""
        if self.backend == "onednn":
            self.derived = (torch.ops.mkldnn._reorder_linear_weight(self.weight, None),)
        elif self.backend == "fp8":
            fresh = quantise(self.weight)
            if self.derived:
                for old, new in zip(self.derived, fresh, strict=True):
                    old.copy_(new)
            else:
                self.derived = fresh

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.backend == "onednn":
            y_TO = torch.ops.mkldnn._linear_pointwise(x_TI, *self.derived, None, "none", [], "")
        elif self.backend == "fp8":
            y_TO = fp8_linear(x_TI, *self.derived)
        else:
            y_TO = F.linear(x_TI, self.weight)
        if self.after is not None:
            y_TO = self.after(y_TO)
        return y_TO if self.bias is None else y_TO + self.bias


class Fused:
    """One product whose output columns are those of several linears."""

    def __init__(self, linear: EngineLinear, widths: tuple[int, ...]):
        self.linear, self.widths = linear, widths

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear.forward(x).split_with_sizes(self.widths, -1)


class LaneEmbedding(nn.Module):
    """Rows [first, last) of the embedding; ids of other lanes give zeros, and the sum over lanes is the lookup."""

    def __init__(self, rows: tuple[int, int], width: int, lane: Lane):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows[1] - rows[0], width), requires_grad=False)
        self.first, self.lane = rows[0], lane

    def forward(self, ids_T: Tensor) -> Tensor:
        local_T = ids_T - self.first
        elsewhere_T = (local_T < 0) | (local_T >= self.weight.shape[0])
        return self.lane.sum(F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight).masked_fill_(elsewhere_T[:, None], 0))


def packed_backend(dtype: torch.dtype) -> str:
    """The backend a CPU multiplies `dtype` with: onednn where it can pack it (bf16 needs AVX-512 or AVX-NE-CONVERT), or plain."""
    packs = torch.backends.mkldnn.is_available() and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return "onednn" if packs else "plain"


def for_engine(model: nn.Module, lane: Lane, backend: str) -> None:
    """Swap the linears of a Transformer (on meta) for a lane's. `backend` is plain, onednn or fp8; the head is never fp8."""
    shape: Shape = model.shape
    cut = lane_slices(shape, lane.rank, lane.size)
    width = {name: last - first for name, (first, last) in cut.items()}
    E, total = shape.hidden, lane.sum if lane.size > 1 else None
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module, names in ((attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))):
            for name in names:
                delattr(module, name)
        attention.qkv_proj = EngineLinear((width["q"] + 2 * width["kv"], E), shape.qkv_bias, backend)
        attention.qkv = Fused(attention.qkv_proj, (width["q"], width["kv"], width["kv"]))
        attention.o_proj = EngineLinear((E, width["q"]), shape.o_bias, backend, total)
        mlp.gate_up_proj = EngineLinear((2 * width["ffn"], E), False, backend)
        mlp.gate_up = Fused(mlp.gate_up_proj, (width["ffn"], width["ffn"]))
        mlp.down_proj = EngineLinear((E, width["ffn"]), False, backend, total)
    if lane.size > 1:
        model.model.embed_tokens = LaneEmbedding(cut["vocab"], E, lane)
    gather = (lambda logits_RV: lane.gather_columns(logits_RV, shape.vocab)) if lane.size > 1 else None
    model.lm_head = EngineLinear((width["vocab"], E), False, "plain" if backend == "fp8" else backend, gather)


def by_rows(model: nn.Module) -> None:
    """On a CPU in fp32: SiLU and norms with a residual by the compiled loops of kernels/rows.py, rotations by attention's."""
    import numba

    from kernels.rows import norm_rows, silu_rows
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    for layer in model.model.layers:
        layer.self_attn.rotate = lambda x_THD, cos, sin: x_THD
        layer.post_attention_layernorm.compute = norm_rows
        layer.mlp.activate = silu_rows
    for layer in model.model.layers[1:]:  # the first one has no residual yet
        layer.input_layernorm.compute = norm_rows
    model.model.norm.compute, model.model.rotary = norm_rows, lambda shape, positions_T: (None, None)
    for module in model.modules():  # torch looks for them elsewhere first: 250 times a step, none of it in a cache
        vars(module).update(module.named_children())


def refresh(model: nn.Module) -> None:
    """Derive all packed and quantised copies anew: the live weights have changed and are proved."""
    for module in model.modules():
        if isinstance(module, EngineLinear):
            module.refresh()
