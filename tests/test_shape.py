"""Model shapes: exact counts of the eight published configs, and refusal of every field that model.py would get wrong (E12)."""

import json

import pytest

from config import ConfigError
from settings import build
from shape import Llama3Rope, check_exact, read_shape, shape_from_hf

LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
               "rope_type": "llama3"}


def hf(kind: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more) -> dict:
    """The fields of a Hub config.json that every family has."""
    return {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "initializer_range": 0.02, "use_cache": True, "bos_token_id": 1, "eos_token_id": 2} | more


LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "attention_dropout": 0.0, "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "architectures": ["LlamaForCausalLM"]}
QWEN2 = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "rope_theta": 1e6}
QWEN3 = {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
         "max_window_layers": 28, "rope_theta": 1e6, "attention_dropout": 0.0}
TABLE = {  # as on the Hub; then N, N_mat, KV bytes a token in bf16 (FACTS.md, checked there on the meta device)
    "SmolLM2-135M": (hf("llama", 30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True, rope_theta=100000, rope_scaling=None,
                        rope_interleaved=False, is_llama_config=True, initializer_range=0.041666666666666664,
                        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
                     134_515_008, 134_479_872, 23_040),
    "Qwen3-0.6B": (hf("qwen3", 28, 1024, 3072, 16, 8, 151936, tie_word_embeddings=True, **QWEN3),
                   596_049_920, 595_984_384, 114_688),
    "Qwen2.5-7B": (hf("qwen2", 28, 3584, 18944, 28, 4, 152064, **QWEN2), 7_615_616_512, 7_070_285_824, 57_344),
    "Llama-3.1-8B": (hf("llama", 32, 4096, 14336, 32, 8, 128256, **LLAMA), 8_030_261_248, 7_504_658_432, 131_072),
    "Qwen3-8B": (hf("qwen3", 36, 4096, 12288, 32, 8, 151936, **QWEN3), 8_190_735_360, 7_568_097_280, 147_456),
    "Qwen3-32B": (hf("qwen3", 64, 5120, 25600, 64, 8, 151936, **QWEN3), 32_762_123_264, 31_983_534_080, 262_144),
    "Llama-3.1-70B": (hf("llama", 80, 8192, 28672, 64, 8, 128256, **LLAMA), 70_553_706_496, 69_501_714_432, 327_680),
    "Qwen2.5-72B": (hf("qwen2", 80, 8192, 29568, 64, 8, 152064, **QWEN2), 72_706_203_648, 71_458_357_248, 327_680),
}
TINY = hf("llama", 4, 40, 48, 4, 2, 96, head_dim=16)


def refusal(config: dict) -> str:
    with pytest.raises(ConfigError) as error:
        shape_from_hf(config)
    return str(error.value)


# --- the table of FACTS.md


@pytest.mark.parametrize("name", TABLE)
def test_published_parameter_counts_exactly(name):
    """N, N_mat and KV bytes: tied heads counted once, qkv biases, q/k norms, and heads x head_dim != hidden (Qwen3)."""
    config, parameters, matmul, kv_bytes = TABLE[name]
    shape = shape_from_hf(config)
    assert (shape.parameters, shape.matmul_parameters, shape.kv_bytes_per_token(2)) == (parameters, matmul, kv_bytes)
    assert shape.kv_bytes_per_token(4) == 2 * kv_bytes


def test_families_differ_where_they_do():
    """Bias, norms, tying and rope are read, not assumed: one wrong flag still gives fluent text."""
    flags = {name: (s.tied, s.qkv_bias, s.o_bias, s.qk_norm, s.head_dim, s.rope_theta, s.rope_scaling is not None, s.norm_eps)
             for name, s in ((name, shape_from_hf(row[0])) for name, row in TABLE.items())}
    assert flags["SmolLM2-135M"] == (True, False, False, False, 64, 1e5, False, 1e-6)
    assert flags["Qwen3-0.6B"] == (True, False, False, True, 128, 1e6, False, 1e-6)
    assert flags["Qwen2.5-7B"] == (False, True, False, False, 128, 1e6, False, 1e-6)
    assert flags["Llama-3.1-70B"] == (False, False, False, False, 128, 5e5, True, 1e-5)
    assert all(set(shape_from_hf(row[0]).windows) == {0} for row in TABLE.values())


def test_forward_flops():
    """2 N_mat a token + 4 L heads head_dim a (query, key) pair; Llama-3.1-70B at 3 tokens over 1, 2, 3 keys."""
    shape = shape_from_hf(TABLE["Llama-3.1-70B"][0])
    assert shape.forward_flops(3, 1 + 2 + 3) == 2 * 69_501_714_432 * 3 + 4 * 80 * 64 * 128 * 6


def test_attention_bias_of_llama_and_qwen3_covers_the_output_projection():
    """attention_bias adds q, k, v *and* o biases there; Qwen2 has q, k, v biases and never one on o."""
    plain = shape_from_hf(TINY).parameters
    for kind, qk_norm in (("llama", 0), ("qwen3", 4 * 2 * 16)):
        shape = shape_from_hf(TINY | {"model_type": kind, "attention_bias": True})
        assert (shape.qkv_bias, shape.o_bias) == (True, True)
        assert shape.parameters == plain + qk_norm + 4 * (16 * (4 + 2 + 2) + 40)
    qwen2 = shape_from_hf(TINY | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False) and qwen2.parameters == plain + 4 * 16 * (4 + 2 + 2)


# --- E12: refusals


@pytest.mark.parametrize("key, value", [
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    ("rope_scaling", {"rope_type": "yarn"}), ("rope_scaling", LLAMA3_ROPE | {"rope_type": "yarn"}),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", LLAMA3_ROPE | {"attention_factor": 0.5}),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}),
    ("hidden_act", "gelu"), ("hidden_act", "gelu_pytorch_tanh"), ("mlp_bias", True), ("partial_rotary_factor", 0.5),
    ("quantization_config", {"quant_method": "fp8"}), ("logit_scale", 0.0625), ("final_logit_softcapping", 30.0),
    ("attention_dropout", 0.1), ("num_experts", 8), ("a_field_of_next_year", "on"), ("head_dtype", ["float16"]),
    ("model_type", "gemma"), ("model_type", "gemma2"), ("model_type", "qwen3_moe"), ("model_type", None),
    ("num_key_value_heads", 3), ("layer_types", ["full_attention"] * 3), ("layer_types", ["chunked_attention"] * 4),
], ids=lambda value: str(value)[:50])
def test_e12_a_field_that_changes_the_forward_pass_is_refused_by_name(key, value):
    """E12: a silently ignored rope_scaling, bias or activation trains another model; the key and its value are named."""
    message = refusal(TINY | {key: value})
    assert f"`{key}` = {value!r}" in message


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_e12_a_missing_dimension_is_named(key):
    """A cut config.json is a config error with the key, not a KeyError's traceback."""
    assert f"`{key}`" in refusal({name: value for name, value in TINY.items() if name != key})


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_e12_an_incomplete_llama3_rope_is_refused(key):
    """llama3 scaling without one of its four numbers names rope_scaling and the number."""
    message = refusal(TINY | {"rope_scaling": {name: value for name, value in LLAMA3_ROPE.items() if name != key}})
    assert "`rope_scaling`" in message and key in message


@pytest.mark.parametrize("key, value", [
    ("mlp_bias", False), ("attention_dropout", 0.0), ("quantization_config", None), ("num_experts", 0), ("rope_scaling", None),
    ("rope_scaling", {"rope_type": "default"}), ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}), ("torch_dtype", "float16"),
    ("_name_or_path", "x"), ("transformers_version", "9"), ("eos_token_id", [1, 2]), ("head_dim", None)], ids=str)
def test_e12_what_changes_nothing_is_not_refused(key, value):
    """Keys that are off, or say nothing about the forward pass: refusing those would refuse every real checkpoint."""
    base = TINY | {"hidden_size": 64}  # so that a head_dim of None means 16 as well
    assert shape_from_hf(base | {key: value}) == shape_from_hf(base)


# --- spellings


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3_ROPE, "type": "llama3"}},
    {"rope_theta": 500000.0, "rope_scaling": {("type" if key == "rope_type" else key): v for key, v in LLAMA3_ROPE.items()}},
    {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
    {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "rope_scaling": None, "rope_theta": None},
], ids=["4", "4 with both type keys", "old type key", "5", "5 with nulls"])
def test_rope_in_the_spelling_of_transformers_4_and_5(spelling):
    """transformers 5 moved rope_theta and rope_scaling into rope_parameters; read from the wrong place, theta is 10000."""
    shape = shape_from_hf(TINY | spelling)
    assert shape.rope_theta == 500000.0
    assert shape.rope_scaling == Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def test_default_rope_in_both_spellings():
    """Plain rope with theta 1e6, and the family's 10000 where none is given."""
    for spelling in ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}):
        shape = shape_from_hf(TINY | spelling)
        assert (shape.rope_theta, shape.rope_scaling) == (1e6, None)
    assert shape_from_hf(TINY).rope_theta == 10000.0


# --- sliding windows


@pytest.mark.parametrize("kind, fields, windows", [
    ("mistral", {"sliding_window": 4}, (4, 4, 4, 4)),
    ("mistral", {"sliding_window": None}, (0, 0, 0, 0)),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0}, (0, 0, 0, 0)),
    ("qwen2", {"sliding_window": 4, "max_window_layers": 0}, (0, 0, 0, 0)),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, (4, 4, 4, 4)),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 4)),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 9}, (0, 0, 0, 0)),
    ("qwen3", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 4, 4)),
    ("qwen3", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 4,
               "layer_types": ["sliding_attention", "full_attention"] * 2}, (4, 0, 4, 0)),
    ("qwen3", {"sliding_window": 4, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}, (0, 0, 0, 0)),
], ids=str)
def test_e12_sliding_window_follows_its_flag(kind, fields, windows):
    """E12: Qwen's window counts only with the flag and above max_window_layers; Mistral's always; layer_types overrides."""
    assert shape_from_hf(TINY | {"model_type": kind} | fields).windows == windows


@pytest.mark.parametrize("kind, changed", [
    ("mistral", {}), ("mistral", {"sliding_window": 4}), ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 30}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 30}),
    ("qwen3", {"head_dim": None}), ("qwen3", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}),
    ("llama", {"num_key_value_heads": None}), ("mistral", {"num_key_value_heads": None}), ("qwen2", {"rms_norm_eps": None}),
    ("mistral", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2})], ids=str)
def test_e12_what_a_config_leaves_out_means_what_it_means_to_transformers(kind, changed):
    """Equal to transformers' reading, or refused: Mistral without a sliding_window has 4096 there; no window is another model."""
    from transformers import AutoConfig
    config = {key: value for key, value in (TINY | {"model_type": kind} | changed).items()
              if value is not None or key == "sliding_window"}  # None: the key is absent; a window of null is a real spelling
    try:
        shape = shape_from_hf(config)
    except ConfigError as error:
        assert any(f"`{key}`" in str(error) for key in changed or ["sliding_window"])
        return
    theirs = AutoConfig.for_model(**config)
    types = getattr(theirs, "layer_types", None) if kind != "mistral" else None  # MistralModel has one mask for all layers
    window = theirs.to_dict().get("sliding_window") or 0
    windows = tuple(window if types is None or kind_of == "sliding_attention" else 0
                    for kind_of in types or [None] * config["num_hidden_layers"])
    assert shape.windows == windows
    assert shape.kv_heads == theirs.num_key_value_heads and shape.norm_eps == theirs.rms_norm_eps
    assert shape.head_dim == (theirs.to_dict().get("head_dim") or theirs.hidden_size // theirs.num_attention_heads)


# --- folders and exact mode


def test_read_shape_of_a_folder(tmp_path):
    """A folder without config.json is named; with one it is read."""
    with pytest.raises(ConfigError, match=f"`model.path` = '{tmp_path}': no config.json there"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert read_shape(tmp_path) == read_shape(str(tmp_path)) == shape_from_hf(TINY)


@pytest.mark.parametrize("text", ["", "{\"model_type\": \"llama\"", "[]"])
def test_a_broken_config_json_is_a_config_error(text, tmp_path):
    """A half-downloaded config.json: one line with the folder's name, not a JSON traceback."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        read_shape(tmp_path)


@pytest.mark.parametrize("name, key, value", [("hidden_size", "hidden_size", 40), ("intermediate_size", "intermediate_size", 56),
                                              ("head_dim", "head_dim", 24), ("vocab_size", "vocab_size", 100)])
def test_exact_mode_refuses_widths_that_were_never_shown_to_be_exact(name, key, value):
    """SiLU and GEMMs change bits at widths that are not multiples of 16; without `exact` such a model is welcome."""
    base = TINY | {"hidden_size": 64}
    check_exact(build({"exact": True}), shape_from_hf(base))
    odd = shape_from_hf(base | {key: value})
    check_exact(build({}), odd)
    with pytest.raises(ConfigError, match=f"`exact` .* {name} = {value}"):
        check_exact(build({"exact": True}), odd)
