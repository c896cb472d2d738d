"""Tiny random models of every supported family, built by transformers: the reference that model.py must agree with.

Weights are large enough that attention is far from uniform, norms differ from 1 and biases from 0: with transformers' own
initial values a forgotten bias, norm weight, window or rotation would pass unseen. They are small enough that logits stay below
5, where transformers differs from itself (eager, SDPA) by 3e-6 and 1e-5 is a meaningful bound.
"""

import json

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from model import Transformer
from shape import shape_from_hf


def randomise(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    return model


# head_dim 16 has rotary wavelengths 6.3, 20, 63, 199 ...: below 64/4 kept, above 64/1 stretched, two of them on the ramp.
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
_BASE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
_CONFIGS = {
    "llama": LlamaConfig(**_BASE),
    "llama-mha": LlamaConfig(**_BASE | {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "llama-tied": LlamaConfig(**_BASE | {"tie_word_embeddings": True}),
    "llama-bias": LlamaConfig(**_BASE, attention_bias=True),
    "llama-narrow": LlamaConfig(**_BASE | {"hidden_size": 40, "num_key_value_heads": 1}, head_dim=16),
    "llama-rope": LlamaConfig(**_BASE, rope_parameters=_LLAMA3),
    "llama-theta": LlamaConfig(**_BASE, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "mistral": MistralConfig(**_BASE, sliding_window=None),
    "mistral-window": MistralConfig(**_BASE, sliding_window=4),
    "qwen2": Qwen2Config(**_BASE, use_sliding_window=False, sliding_window=4, max_window_layers=1),
    "qwen2-window": Qwen2Config(**_BASE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen2-tied": Qwen2Config(**_BASE | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**_BASE | {"hidden_size": 48}, head_dim=16),
    "qwen3-bias": Qwen3Config(**_BASE | {"tie_word_embeddings": True}, head_dim=32, attention_bias=True),
    "qwen3-window": Qwen3Config(**_BASE, head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=2),
}


def _reference(config, seed: int) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return randomise(model.eval(), seed)


FAMILIES: dict[str, PreTrainedModel] = {name: _reference(config, seed) for seed, (name, config) in enumerate(_CONFIGS.items())}


def hf_config(reference: PreTrainedModel) -> dict:
    """config.json as most Hub files are: without `layer_types`, and with the window that Qwen's flag switches off."""
    written = json.loads(reference.config.to_json_string())
    written.pop("layer_types", None)
    return written | ({"sliding_window": 4} if written.get("use_sliding_window") is False else {})


def ours(reference: PreTrainedModel, vocab: int | None = None) -> Transformer:
    """model.py's Transformer with the reference's weights, each tensor copied exactly once by its name."""
    shape = shape_from_hf(hf_config(reference))
    model = Transformer(shape, vocab or shape.vocab)
    source, target = dict(reference.named_parameters()), dict(model.named_parameters())
    assert source.keys() == target.keys(), f"parameters of only one side: {sorted(source.keys() ^ target.keys())}"
    with torch.no_grad():
        for name, parameter in target.items():
            assert parameter.shape == source[name].shape, name
            parameter.copy_(source[name])
    return model
