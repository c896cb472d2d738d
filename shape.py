"""The shape of a model: what a Hugging Face `config.json` says about the forward pass. No torch.

Fields that model.py does not implement are refused by name: a silently ignored `rope_scaling` trains the wrong model.

Llama-3.1-70B: 70,553,706,496 parameters, of which 69,501,714,432 multiply (all linears and the head, not the input lookup,
not norms), so a forward costs 2 x 69.5e9 = 139 GFLOP a token before attention, and a token keeps
2 x 80 layers x 8 KV heads x 128 x 2 bytes = 327,680 bytes of keys and values in bf16.
"""

import dataclasses
import json
from pathlib import Path

from config import Config, ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: long wavelengths stretched by `factor`, short kept, a ramp in between."""
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family: what distinguishes Llama 3, Qwen2.5, Qwen3, Mistral and SmolLM2 from each other."""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    windows: tuple[int, ...]  # per layer: keys a query sees, itself included; 0 is all
    max_position: int
    init_std: float

    @property
    def matmul_parameters(self) -> int:
        """N_mat: weights of all linears and of the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """N: everything that is trained, a tied head counted once."""
        bias = self.qkv_bias * self.head_dim * (self.heads + 2 * self.kv_heads) + self.o_bias * self.hidden
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self.matmul_parameters + self.layers * (bias + norms) + self.hidden + embedding

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Keys and values of all layers for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_element

    def forward_flops(self, tokens: int, context_sum: int) -> int:
        """2·N_mat per token plus 4·L·heads·head_dim per (query, key) pair; `context_sum` counts the pairs attended."""
        return 2 * self.matmul_parameters * tokens + 4 * self.layers * self.heads * self.head_dim * context_sum


_SUPPORTED = {"llama", "mistral", "qwen2", "qwen3"}
_USED = {
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
    "max_position_embeddings", "initializer_range",
}
# Says nothing about the forward pass: bookkeeping, generation defaults, hints for other software.
_IGNORED = {
    "architectures", "torch_dtype", "dtype", "use_cache", "transformers_version", "pretraining_tp", "is_llama_config",
    "transformers.js_config", "name_or_path", "auto_map", "id2label", "label2id", "return_dict",
    "output_router_logits", "chunk_size_feed_forward", "problem_type", "use_bfloat16", "torchscript", "task_specific_params",
}


def read_shape(path: str | Path, field: str = "model.path") -> Shape:
    """Shape from a HF folder's `config.json`.

    Raises ConfigError for a missing file, an unsupported architecture, or a field that would change the forward pass in a
    way model.py does not implement.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"`{field}` = {str(path)!r}: no config.json there; give a Hugging Face model folder")
    try:
        hf = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"`{field}` = {str(path)!r}: config.json is not JSON ({error})") from None
    if not isinstance(hf, dict):
        raise ConfigError(f"`{field}` = {str(path)!r}: config.json holds no object")
    return shape_from_hf(hf)


def shape_from_hf(hf: dict) -> Shape:
    """Shape from the contents of a HF `config.json`. Raises ConfigError as `read_shape` does."""
    def refuse(key: str, fix: str):
        raise ConfigError(f"config.json: `{key}` = {hf.get(key)!r} is not supported; {fix}")

    kind = hf.get("model_type")
    if kind not in _SUPPORTED:
        refuse("model_type", f"supported are {', '.join(sorted(_SUPPORTED))}")
    for key in sorted(hf.keys() - _USED - _IGNORED):
        if not key.startswith("_") and not key.endswith("_token_id") and hf[key] not in (None, False, 0, 0.0, [], {}, ""):
            refuse(key, "it may change the forward pass, which model.py would then compute wrongly")
    if hf.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "only silu is implemented")

    for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not hf.get(key):
            refuse(key, "the model's size is needed")
    # Where transformers has a default of its own that is easily misread, the value must stand in the file.
    for needed_by, key in (("qwen3", "head_dim"), ("mistral", "num_key_value_heads")):
        if kind == needed_by and not hf.get(key):
            refuse(key, "it must be given")
    if kind == "mistral" and "sliding_window" not in hf:
        refuse("sliding_window", "give a number or null")
    if kind == "mistral" and hf.get("layer_types"):
        refuse("layer_types", "Mistral has one window for all layers")
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    kv_heads = hf.get("num_key_value_heads") or heads
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    if heads % kv_heads:
        refuse("num_key_value_heads", f"it must divide num_attention_heads = {heads}")

    rope = dict(hf.get("rope_parameters") or {}) | dict(hf.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    scaling = None
    if rope_type == "llama3":
        missing = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"} - rope.keys()
        if missing:
            refuse("rope_scaling" if hf.get("rope_scaling") else "rope_parameters", f"llama3 needs {sorted(missing)}")
        scaling = Llama3Rope(rope.pop("factor"), rope.pop("low_freq_factor"), rope.pop("high_freq_factor"),
                             rope.pop("original_max_position_embeddings"))
    elif rope_type != "default":
        refuse("rope_scaling" if hf.get("rope_scaling") else "rope_parameters", "implemented are default and llama3")
    if {key: value for key, value in rope.items() if value not in (None, 1.0)}:
        refuse("rope_scaling" if hf.get("rope_scaling") else "rope_parameters", f"unknown entries {sorted(rope)}")

    always_windowed = kind == "mistral"  # Qwen switches its window on with a flag, Mistral by naming one
    window = hf.get("sliding_window") or 0
    if not (always_windowed or hf.get("use_sliding_window", False)):
        window = 0
    types = hf.get("layer_types")
    if types is None:
        first = 0 if always_windowed else hf.get("max_window_layers", 28)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if set(types) - {"full_attention", "sliding_attention"} or len(types) != layers:
        refuse("layer_types", "one of full_attention, sliding_attention for each layer")
    windows = tuple(window if kind_of == "sliding_attention" else 0 for kind_of in types)

    bias = bool(hf.get("attention_bias", False))
    if bias and kind not in ("llama", "qwen3"):
        refuse("attention_bias", f"{kind} has none")
    return Shape(
        layers=layers, hidden=hf["hidden_size"], ffn=hf["intermediate_size"], heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, vocab=hf["vocab_size"], tied=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bias, o_bias=bias, qk_norm=kind == "qwen3",
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)), rope_theta=theta, rope_scaling=scaling, windows=windows,
        max_position=hf.get("max_position_embeddings", 2048), init_std=float(hf.get("initializer_range", 0.02)))


def check_exact(config: Config, shape: Shape) -> None:
    """Refuse exact mode where bits are known to differ: SiLU changes them at other widths, for few rows."""
    widths = {"hidden_size": shape.hidden, "intermediate_size": shape.ffn, "head_dim": shape.head_dim,
              "vocab_size": shape.vocab}
    for name, width in widths.items():
        if config.exact and width % 16:
            raise ConfigError(f"`exact` needs widths that are multiples of 16, but config.json has {name} = {width}; "
                              "set exact=false")


def check_positions(config: Config, shape: Shape) -> None:
    """Refuse sequences longer than the model's positions: RoPE would extrapolate silently. Raises ConfigError."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > shape.max_position:
        raise ConfigError(f"`data.max_prompt_tokens` + `rollout.max_new_tokens` = {longest}, but config.json has "
                          f"max_position_embeddings = {shape.max_position}; lower one of them")
