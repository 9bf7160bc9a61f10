"""Tiny GGUF files written with the gguf package: its name map, and a permutation spelled out row by row."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def interleaved_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of llama files: row i of a head's first half, then row i of its second half."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def gguf_metadata(config: Mapping) -> dict[str, object]:
    """What a converter writes for a config.json."""
    arch = config["model_type"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    return {f"{arch}.{key}": value for key, value in values.items()} | tokenizer


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_gguf(
    path: Path,
    config: Mapping,
    weights: Mapping[str, torch.Tensor],
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: Mapping[str, object] | None = None,
    remove: tuple[str, ...] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    arch: str | None = None,
) -> Path:
    """A GGUF file at `path`.

    Metadata keys are given with dots in `metadata`; `remove` takes keys away; `tensors` are added as they are, under
    their GGUF names. Matrices are stored as `quant`, or as `kinds` says where a key of it is part of the Hugging Face
    name; vectors as F32.
    """
    writer = gguf.GGUFWriter(path, arch or config["model_type"])
    for key, value in {**gguf_metadata(config), **(metadata or {})}.items():
        if key not in remove:
            add_metadata(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for hf_name, tensor in weights.items():
        stored_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        rows = tensor.float().numpy()
        for part, num_heads in heads.items():
            if config["model_type"] == "llama" and part in stored_name:
                rows = interleaved_rows(rows, num_heads)
        asked = next((kind for part, kind in (kinds or {}).items() if part in hf_name), quant)
        kind = asked if rows.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored_name, gguf.quantize(rows, kind), raw_dtype=kind)
    for stored_name, array in (tensors or {}).items():
        writer.add_tensor(stored_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
