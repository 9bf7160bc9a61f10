"""GGUF metadata -> ModelConfig. Keys as llama.cpp writes them: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from octavo.config.model import ModelConfig, RopeConfig
from octavo.errors import InvalidInput, not_built, printable
from octavo.gguf_file import GGUFFile
from octavo.loader.fields import Fields
from octavo.loader.hf_config import read_default_sampling
from octavo.loader.rope_config import DEFAULT_THETA, MAX_FACTOR, supported_length

ROPE_FREQS = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency, written for llama3 scaling."""
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ids under tokenizer.ggml that end a text, a turn or a message."""
SAMPLING_KEYS = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""general.sampling.* -> field of SamplingParams."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """What differs between the architectures a GGUF file may name."""

    name: str
    """Registry name."""
    permuted_qk: bool
    """Rows of Q and K are stored for interleaved rotation."""


ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", permuted_qk=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", permuted_qk=False),
}


def _section(file: GGUFFile, prefix: str) -> Fields:
    """Metadata whose keys begin with `prefix` and a dot."""
    return Fields(file.metadata, str(file.path), f"{prefix}.")


def gguf_architecture(file: GGUFFile) -> GGUFArchitecture:
    """Raises InvalidInput for a file that is no model, one part of several, or of an unknown architecture."""
    general, split = _section(file, "general"), _section(file, "split")
    if general.string("type", "model") != "model":
        raise general.refusal("type", "model; give the file of the model itself")
    if split.integer("count", 1, minimum=0) > 1:
        raise not_built(
            f"{file.path} is one of {split.get('count')} parts; reading split GGUF files",
            "join them with llama-gguf-split --merge",
        )
    name = general.string("architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InvalidInput(f"{file.path}: architecture {printable(name)} is not known; those there are: {known}")
    return ARCHITECTURES[name]


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The ModelConfig of a GGUF file.

    Raises:
        InvalidInput: a key is missing, contradicts another or the tensors, or asks for what is not there.
    """
    architecture = gguf_architecture(file)
    keys = _section(file, str(file.metadata["general.architecture"]))
    if keys.integer("expert_count", 0, minimum=0):
        raise not_built(f"{file.path}: a mixture of {keys.get('expert_count')} experts", "use a dense model")
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.same_in_all_layers("attention.head_count")
    num_kv_heads = keys.same_in_all_layers("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refusal("attention.head_count_kv", f"a divisor of head_count={num_heads}")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    rope = _rope(file, keys, head_dim)
    max_positions = supported_length(rope, keys.integer("context_length"))
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    window_used = 0 < window < max_positions
    return ModelConfig(
        architecture="MistralForCausalLM" if window_used and architecture.permuted_qk else architecture.name,
        vocab_size=_vocab_size(file, keys),
        hidden_size=hidden_size,
        intermediate_size=keys.same_in_all_layers("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=_shortest(keys.number("attention.layer_norm_rms_epsilon")),
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sliding_window=window if window_used else None,
        dtype=_stored_dtype(file),
        eos_token_ids=_eos_token_ids(file),
        default_sampling=_default_sampling(file),
    )


def _head_dim(keys: Fields, hidden_size: int, num_heads: int) -> int:
    if "attention.key_length" not in keys and hidden_size % num_heads:
        raise keys.refusal("embedding_length", f"a multiple of head_count={num_heads}")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise not_built(f"{keys.source}: attention.value_length other than key_length={head_dim}")
    if head_dim % 2:
        raise keys.refusal("attention.key_length", "even: rotary embeddings need pairs")
    return head_dim


def _vocab_size(file: GGUFFile, keys: Fields) -> int:
    """The embedding table has the say; what else is written must not contradict it."""
    has_tokens = "tokenizer.ggml.tokens" in file.metadata
    num_tokens = file.metadata.array_length("tokenizer.ggml.tokens") if has_tokens else 0
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else num_tokens
    vocab_size = keys.integer("vocab_size", rows or None)
    if vocab_size != rows or num_tokens > rows:
        raise InvalidInput(
            f"{file.path}: vocab_size={vocab_size} and {num_tokens} tokens do not fit {rows} rows of "
            "token_embd.weight; get the file again"
        )
    return vocab_size


def _rope(file: GGUFFile, keys: Fields, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", DEFAULT_THETA)
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise keys.refusal("rope.dimension_count", f"even and at most head_dim={head_dim}")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise not_built(f"{file.path}: {name} (longrope)")
    plain = RopeConfig(theta=theta, partial_rotary_factor=rotated / head_dim)
    scaling = keys.string("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    if scaling not in ("none", "linear", "yarn"):
        raise keys.refusal("rope.scaling.type", "none, linear or yarn")
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return replace(plain, inv_freq_divisors=_divisors(file, rotated // 2))
    if ROPE_FREQS in file.tensors:
        raise InvalidInput(f"{file.path}: {ROPE_FREQS} together with rope.scaling.type={scaling} is not supported")
    if not 1 <= factor <= MAX_FACTOR:
        raise keys.refusal("rope.scaling.factor", f"a number of at least 1 and at most {MAX_FACTOR:.0f}")
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    if scaling == "linear":
        return replace(plain, rope_type="linear", factor=factor, original_max_position_embeddings=original)
    if keys.number("rope.scaling.yarn_ext_factor", 1.0, minimum=-math.inf) not in (1.0, -1.0):
        raise not_built(f"{file.path}: rope.scaling.yarn_ext_factor other than 1")
    return replace(
        plain,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(keys, factor),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _attention_factor(keys: Fields, factor: float) -> float | None:
    """llama.cpp multiplies yarn's own factor (0.1 ln s + 1) with the stored one; None leaves yarn's own."""
    stored = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    return None if stored == 1.0 else stored * (0.1 * math.log(factor) + 1.0)


def _divisors(file: GGUFFile, num_frequencies: int) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.type != GGMLQuantizationType.F32 or tensor.num_elements != num_frequencies:
        raise InvalidInput(
            f"{file.path}: {ROPE_FREQS} is {tensor.num_elements} x {tensor.type_name}, "
            f"it must be {num_frequencies} x F32; get the file again"
        )
    divisors = file.raw(tensor).view(np.float32)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise InvalidInput(f"{file.path}: {ROPE_FREQS} holds numbers that are not above 0; get the file again")
    return None if (divisors == 1.0).all() else tuple(divisors.tolist())


def _stored_dtype(file: GGUFFile) -> str:
    """The dtype of the matrices: the float type of all of them, or quantized."""
    dtypes = {
        GGMLQuantizationType.F32: "float32",
        GGMLQuantizationType.F16: "float16",
        GGMLQuantizationType.BF16: "bfloat16",
    }
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    only = types.pop() if len(types) == 1 else None
    return dtypes.get(only, "quantized") if isinstance(only, GGMLQuantizationType) else "quantized"


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    keys = _section(file, "tokenizer.ggml")
    return tuple(sorted({keys.integer(key, minimum=0) for key in EOS_KEYS if key in keys}))


def _default_sampling(file: GGUFFile) -> tuple[tuple[str, float | int], ...]:
    keys = _section(file, "general.sampling")
    values = {field: keys.get(key) for key, field in SAMPLING_KEYS.items()}
    return read_default_sampling(Fields({field: _shortest(v) for field, v in values.items()}, keys.source))


def _shortest(value: Any) -> Any:
    """The shortest decimal that gives a stored float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
