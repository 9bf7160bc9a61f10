"""Qwen2 (Yang et al. 2024): Llama with a bias on the query, key and value projections and on nothing else."""

from dataclasses import replace

from octavo.config.model import ModelConfig
from octavo.layers.context import LayerContext
from octavo.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The biases belong to the architecture: its config.json does not mention them."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, max_model_len: int) -> None:
        config = replace(config, qkv_bias=True, attention_output_bias=False, mlp_bias=False)
        super().__init__(config, ctx, max_model_len)
