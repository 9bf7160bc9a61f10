"""Tiny models, and a driver that runs them by hand: a ForwardContext and KV caches, no engine."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from octavo.config.engine_config import ParallelConfig
from octavo.config.model import ModelConfig, RopeConfig
from octavo.layers.context import LayerContext, TensorParallelGroup
from octavo.layers.forward_context import ForwardContext
from octavo.loader.weights import load_weights
from octavo.models.base import CausalLM
from octavo.models.registry import get_model_class
from octavo.ops.interface import AttentionMetadata, KVCache
from octavo.ops.reference import ReferencePlatform

MAX_MODEL_LEN = 128
BLOCK_SIZE = 8
NUM_BLOCKS = 64


def model_config(hf, **changes) -> ModelConfig:
    """ModelConfig of a transformers config object."""
    rope = {key: value for key, value in hf.rope_parameters.items() if key != "rope_theta"}
    llama = hf.model_type == "llama"
    values = {
        "architecture": {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}[
            hf.model_type
        ],
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "max_position_embeddings": hf.max_position_embeddings,
        "rms_norm_eps": hf.rms_norm_eps,
        "hidden_act": hf.hidden_act,
        "rope": RopeConfig(theta=hf.rope_parameters["rope_theta"], **rope),
        "tie_word_embeddings": hf.tie_word_embeddings,
        "qkv_bias": llama and hf.attention_bias,
        "attention_output_bias": llama and hf.attention_bias,
        "mlp_bias": llama and hf.mlp_bias,
        "sliding_window": getattr(hf, "sliding_window", None),
    }
    return ModelConfig(**(values | changes))


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough that attention is far from even and every bias and norm matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1 + 0.3 * noise
        elif parameter.dim() == 1:
            parameter.data = 0.5 * noise
        else:
            gain = 3.0 if "q_proj" in name or "embed" in name else 1.0
            parameter.data = gain * noise / parameter.shape[1] ** 0.5


def build(config: ModelConfig, tensors, parallel=None, group=None, dtype=torch.float32) -> CausalLM:
    """Our model with these checkpoint tensors."""
    ctx = LayerContext(ReferencePlatform(), dtype, parallel or ParallelConfig(), group or TensorParallelGroup())
    model = get_model_class(config.architecture)(config, ctx, MAX_MODEL_LEN)
    load_weights(model.slots(), tensors.items(), "test")
    model.finish()
    return model


@dataclass
class Driver:
    """Requests by name, each with its tokens so far and its blocks. Unused memory is NaN and blocks come shuffled."""

    model: CausalLM
    seed: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        platform = ReferencePlatform()
        specs = self.model.kv_cache_specs("float32")
        self.kv_caches: list[KVCache] = [platform.allocate_kv_cache(spec, NUM_BLOCKS, BLOCK_SIZE) for spec in specs]
        for cache in self.kv_caches:
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)
        self.free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(self.seed)).tolist()

    def step(self, work: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Compute these new tokens of these requests in one forward -> logits of each [n, vocab]."""
        positions, slots, starts, seq_lens = [], [], [0], []
        for name, new in work.items():
            first = self.computed.get(name, 0)
            self.tokens.setdefault(name, []).extend(new)
            table = self.blocks.setdefault(name, [])
            while len(table) * BLOCK_SIZE < first + len(new):
                table.append(self.free.pop())
            places = range(first, first + len(new))
            positions += places
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]
            starts.append(starts[-1] + len(new))
            seq_lens.append(first + len(new))
            self.computed[name] = first + len(new)
        width = max(len(self.blocks[name]) for name in work)
        tables = torch.full((len(work), width), 2**30, dtype=torch.int32)
        for row, name in enumerate(work):
            tables[row, : len(self.blocks[name])] = torch.tensor(self.blocks[name])
        metadata = AttentionMetadata(
            tables, torch.tensor(starts).int(), torch.tensor(seq_lens).int(), torch.tensor(slots)
        )
        ids = torch.tensor([token for new in work.values() for token in new])
        with torch.inference_mode():
            context = ForwardContext(torch.tensor(positions), metadata, self.kv_caches)
            hidden = self.model.forward(self.model.embed(ids), context)
            logits = self.model.compute_logits(hidden)
        return dict(zip(work, logits.split([len(new) for new in work.values()]), strict=True))


@pytest.fixture
def tiny():
    """The helpers of this file, for test files that cannot import it."""
    return SimpleNamespace(model_config=model_config, randomize=randomize, build=build, Driver=Driver)
