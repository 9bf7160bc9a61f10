"""Tiny random checkpoints with a byte-level tokenizer, as Hugging Face folders, for tests of a whole engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
QWEN2.pop("attention_bias")


def byte_tokenizer() -> Tokenizer:
    """One token a byte (ids in the order of the byte-level alphabet), then <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    return tokenizer


def random_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights for a llama or qwen2 config.json, large enough that the most probable token is seldom a near-tie."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qwen2 = config["model_type"] == "qwen2"
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, hidden)
            if qwen2 or config.get("attention_bias"):
                weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(hidden, q)
        if config.get("attention_bias"):
            weights[f"{prefix}self_attn.o_proj.bias"] = normal(hidden)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            weights[f"{prefix}mlp.{name}_proj.weight"] = normal(*shape)
            if config.get("mlp_bias"):
                weights[f"{prefix}mlp.{name}_proj.bias"] = normal(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1.0 + normal(hidden)
    weights["model.norm.weight"] = 1.0 + normal(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.5)
    return weights


def write_model(
    path: Path,
    config: dict | None = None,
    *,
    weights: dict[str, torch.Tensor] | None = None,
    generation_config: dict | None = None,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """A model folder at `path`; `overrides` replace entries of `config` (default LLAMA)."""
    config = {**(config or LLAMA), **overrides}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    save_file(weights or random_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path
