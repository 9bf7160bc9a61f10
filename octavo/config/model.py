"""What a model is: the numbers its architecture needs, read from config.json or from GGUF metadata."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields a type does not use keep their defaults."""

    rope_type: Literal["default", "linear", "yarn", "llama3", "dynamic"] = "default"
    theta: float = 10000.0
    """Base of the frequencies."""
    partial_rotary_factor: float = 1.0
    """Fraction of each head that is rotated."""
    factor: float = 1.0
    """How far beyond the original length positions are stretched."""
    original_max_position_embeddings: int | None = None
    """Length the model was trained on before stretching, in tokens."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin. None: derived from factor."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: round the correction range to whole dimensions."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3: where the stretch begins and where it is complete."""
    inv_freq_divisors: tuple[float, ...] | None = None
    """Per-frequency divisors stored in a GGUF file (rope_freqs.weight); they replace the llama3 rule."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    architecture: str
    """Registry name, e.g. LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence the model supports, in tokens."""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    """The LM head is the embedding table."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Tokens a layer looks back, counting the token itself; None: all."""
    dtype: str = "float32"
    """dtype the checkpoint is stored in: float32, bfloat16, float16 or quantized."""
    eos_token_ids: tuple[int, ...] = ()
    """Union of the ids named by config.json, generation_config.json and the tokenizer."""
    default_sampling: tuple[tuple[str, float | int], ...] = ()
    """Sampling defaults of generation_config.json: (field, value) pairs such as ("temperature", 0.7)."""
