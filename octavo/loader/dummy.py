"""Random weights: a model of the right shape without a download, for trying sizes and speeds."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from octavo.config.model import ModelConfig
from octavo.loader.tensor_source import TensorSource

if TYPE_CHECKING:
    from torch import Tensor

STANDARD_DEVIATION = 0.02
"""As transformers initialises: activations stay finite at any depth."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every parameter of a llama-like decoder (llama, mistral, qwen2)."""
    return dict(iterate_parameter_shapes(config))


def iterate_parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`parameter_shapes` one at a time: the number of layers may be one that nobody checked yet."""
    yield from _outer_shapes(config).items()
    layer_shapes = _layer_shapes(config)
    for layer in range(config.num_layers):
        for name, shape in layer_shapes.items():
            yield f"model.layers.{layer}.{name}", shape


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(tensors, elements) of `parameter_shapes`, counted without naming them."""
    outer, layer = _outer_shapes(config), _layer_shapes(config)
    tensors = len(outer) + config.num_layers * len(layer)
    elements = sum(map(math.prod, outer.values())) + config.num_layers * sum(map(math.prod, layer.values()))
    return tensors, elements


def random_sources(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int) -> Iterator[TensorSource]:
    """One for each (name, shape): `random_tensor`."""
    for name, shape in shapes:
        yield TensorSource(name, partial(random_tensor, name, shape, seed))


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> "Tensor":
    """A float32 tensor that depends on the seed, its name and its shape only.

    Norm weights are drawn around 1, all others around 0, with a standard deviation of 0.02.
    """
    import torch  # the shapes are of use without it

    generator = torch.Generator().manual_seed(_tensor_seed(seed, name))
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    return torch.empty(shape, dtype=torch.float32).normal_(mean, STANDARD_DEVIATION, generator=generator)


def _outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Outside the layers."""
    table = (config.vocab_size, config.hidden_size)
    head = {} if config.tie_word_embeddings else {"lm_head.weight": table}
    return {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,), **head}


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
