"""Random weights: a model of the right shape without a download, for trying sizes and speeds."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from octavo.config.model import ModelConfig

STANDARD_DEVIATION = 0.02
"""As transformers initialises: activations stay finite at any depth."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every parameter of a llama-like decoder (llama, mistral, qwen2)."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) one at a time. A tensor depends on the seed, its name and its shape only.

    Norm weights are drawn around 1, all others around 0, with a standard deviation of 0.02.
    """
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(_tensor_seed(seed, name))
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        yield name, torch.empty(shape, dtype=torch.float32).normal_(mean, STANDARD_DEVIATION, generator=generator)


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (heads, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_heads, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_heads, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, heads, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
