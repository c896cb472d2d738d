"""One decoder-only transformer for engine and learner: Llama 3, Qwen2.5, Qwen3, Mistral, SmolLM2.

Both sides run this same code, which is what makes their logprobs agree; they differ in the `attend` callable that they pass in
(packed sequences for training, paged keys and values for rollouts). There is no batch dimension: the input is T tokens of any
number of sequences, one behind the other, and only `attend` knows where one ends.

Parameter names are Hugging Face's, so a checkpoint needs no renaming. Nothing here knows about ranks: for an engine, parallel.py
swaps the linears of a finished model for fused, packed or tensor-parallel ones.

T packed tokens, E hidden, F ffn, H query heads, K KV heads, D head dim, V vocabulary.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kernels import ROW_PAD
from kernels.logprob import Head, chosen_logprobs
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul
from shape import Shape

Attend = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]  # (q_THD, k_TKD, v_TKD, layer, window) -> o_THD
Rotary = tuple[Tensor, Tensor]  # cos and sin of the step's positions


class RMSNorm(nn.Module):
    """(x / sqrt(mean(x^2) + eps) * weight, x) of x, or of residual + x: the norm, and the stream that goes on beside it."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.compute = eps, rms_norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.compute(x, self.weight, self.eps, residual)


class Together:
    """Linears of one input, called as one. The engine puts a single product over a fused tensor in its place."""

    def __init__(self, *linears: nn.Module):
        self.linears = linears

    def __call__(self, x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in self.linears]


def rope_tables(shape: Shape, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, fp32 [T, 1, D]: bf16 tables lose whole positions beyond 256."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions_T.device).float() / shape.head_dim
    inverse = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling:  # Llama 3.1: wavelengths beyond the original context are stretched, short ones kept, a ramp between
        wavelength = 2 * math.pi / inverse
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        ramp = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor)
        stretched = inverse / scaling.factor
        between = (1 - ramp) * stretched + ramp * inverse
        inverse = torch.where(wavelength > low, stretched, torch.where(wavelength < high, inverse, between))
    angles = positions_T[:, None].float() * inverse
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        E, H, K, D = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim
        self.layer, self.window, self.head_dim = layer, shape.windows[layer], D
        self.q_proj = nn.Linear(E, H * D, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(E, K * D, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(E, K * D, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(H * D, E, bias=shape.o_bias)
        self.q_norm = RMSNorm(D, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(D, shape.norm_eps) if shape.qk_norm else None
        self.qkv, self.rotate = Together(self.q_proj, self.k_proj, self.v_proj), rope

    def forward(self, x_TE: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q_THD, k_TKD, v_TKD = (part.view(x_TE.shape[0], -1, self.head_dim) for part in self.qkv(x_TE))  # -1: a lane has fewer heads
        if self.q_norm is not None:
            (q_THD, _), (k_TKD, _) = self.q_norm(q_THD), self.k_norm(k_TKD)
        o_THD = attend(self.rotate(q_THD, cos, sin), self.rotate(k_TKD, cos, sin), v_TKD, self.layer, self.window)
        return self.o_proj(o_THD.flatten(1))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.gate_up, self.activate = Together(self.gate_proj, self.up_proj), silu_mul

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down_proj(self.activate(*self.gate_up(x_TE)))


KEEP_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


class Layer(nn.Module):
    """One block, and one FSDP unit. `recompute` drops its activations and computes them again in backward: `full` all of them,
    `selective` all but the results of matrix products, which are most of the time and a third of the memory.

    It takes and gives (output of the last branch, residual stream before it): the sum is made inside the next norm.
    """

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)
        self.recompute = "none"

    def forward(self, x_TE: Tensor, residual_TE: Tensor | None, rotary: Rotary, attend: Attend) -> tuple[Tensor, Tensor]:
        if self.recompute != "none" and torch.is_grad_enabled():
            if residual_TE is not None:  # the same sum as inside the norm, but one tensor to keep instead of two
                x_TE, residual_TE = residual_TE + x_TE, None
            # Inside the module, so that FSDP gathers the weights once around both computations.
            chosen = {"context_fn": KEEP_PRODUCTS} if self.recompute == "selective" else {}
            return checkpoint(self._forward, x_TE, residual_TE, rotary, attend, use_reentrant=False, **chosen)
        return self._forward(x_TE, residual_TE, rotary, attend)

    def _forward(self, x_TE: Tensor, residual_TE: Tensor | None, rotary: Rotary, attend: Attend) -> tuple[Tensor, Tensor]:
        x_TE, residual_TE = self.input_layernorm(x_TE, residual_TE)
        x_TE, residual_TE = self.post_attention_layernorm(self.self_attn(x_TE, *rotary, attend), residual_TE)
        return self.mlp(x_TE), residual_TE


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.layers))
        self.norm, self.rotary = RMSNorm(shape.hidden, shape.norm_eps), rope_tables

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        rows = ids_T.shape[0]
        padding = (0, -rows % ROW_PAD)  # the GEMM's bits for 1-3 rows are not those for many
        x_TE, residual_TE = self.embed_tokens(F.pad(ids_T, padding)), None
        rotary = self.rotary(self.shape, F.pad(positions_T, padding))
        for layer in self.layers:
            x_TE, residual_TE = layer(x_TE, residual_TE, rotary, attend)
        return self.norm(x_TE, residual_TE)[0][:rows]


class Transformer(nn.Module):
    """The model with its head. `vocab` is the tokenizer's size: rows of the head beyond it are never sampled or counted.

    `value_head` adds a critic that shares the trunk: one number a token, as in `Scorer`.
    """

    def __init__(self, shape: Shape, vocab: int, value_head: bool = False):
        super().__init__()
        assert vocab <= shape.vocab, f"tokenizer has {vocab} ids, the model only {shape.vocab}"
        self.shape, self.vocab = shape, vocab
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.score = nn.Linear(shape.hidden, 1, bias=False) if value_head else None
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding where the config ties them; `to_empty` and FSDP break the bond."""
        if self.shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids_T: Tensor, attend: Attend, rows_R: Tensor, targets_R: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        """(logprob of `targets`, entropy) at the packed rows `rows_R`, fp32 [R]: the learner's one call."""
        hidden_TE = self.model(ids_T, attend.positions, attend)
        return chosen_logprobs(hidden_TE[rows_R], self.lm_head.weight, targets_R, head)

    def with_values(self, ids_T: Tensor, attend: Attend, rows_R: Tensor, targets_R: Tensor,
                    head: Head) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` and the value head's number at the same rows, fp32 [R] each."""
        hidden_RE = self.model(ids_T, attend.positions, attend)[rows_R]
        return *chosen_logprobs(hidden_RE, self.lm_head.weight, targets_R, head), one_number(hidden_RE, self.score)

    def next_logits(self, ids_T: Tensor, positions_T: Tensor, attend: Attend, rows_R: Tensor) -> Tensor:
        """fp32 [R, V] logits of what follows the rows `rows_R`, -inf beyond the tokenizer: the engine's one call."""
        hidden_RE = self.model(ids_T, positions_T, attend)[rows_R]
        logits_RV = self.lm_head(F.pad(hidden_RE, (0, 0, 0, -len(rows_R) % ROW_PAD)))[:len(rows_R)].float()
        if self.vocab < logits_RV.shape[1]:
            logits_RV[:, self.vocab:] = -torch.inf
        return logits_RV


def one_number(hidden_RE: Tensor, score: nn.Linear) -> Tensor:
    """fp32 [R], row by row: a matrix product's bits would depend on how many rows there are."""
    return (hidden_RE.float() * score.weight.float()).sum(-1)


class Scorer(nn.Module):
    """A decoder with one number a token in place of a head: critic and reward model, Hugging Face's sequence classification."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.score = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, ids_T: Tensor, attend: Attend, rows_R: Tensor) -> Tensor:
        """The number at the packed rows `rows_R`, fp32 [R]."""
        return one_number(self.model(ids_T, attend.positions, attend)[rows_R], self.score)


def init_tensor(name: str, size: torch.Size, shape: Shape, seed: int) -> Tensor:
    """Initial fp32 value of one whole parameter, a function of its name and the seed alone; a rank draws it and keeps its rows."""
    if name.endswith("norm.weight"):
        return torch.ones(size)
    if name.endswith((".bias", "score.weight")):  # a fresh critic expects nothing
        return torch.zeros(size)
    # torch's CPU generator reads the low 32 bits of a seed only: both must be hashed into them.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(size).normal_(0.0, shape.init_std, generator=generator)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and size of every parameter, a tied head once."""
    with torch.device("meta"):
        model = Transformer(shape, shape.vocab)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
