"""Llama (Touvron et al. 2023) and Mistral (Jiang et al. 2023), which is Llama with a sliding window."""

from torch import Tensor

from octavo.config.model import ModelConfig
from octavo.layers.activation import gated_activation
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.forward_context import ForwardContext
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, kv_heads_of_rank
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import build_cos_sin
from octavo.loader.weights import WeightSlot
from octavo.models.base import CausalLM
from octavo.protocol.kv_cache_spec import KVCacheSpec


class LlamaMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedColumnParallelLinear(ctx, hidden, parts, config.mlp_bias)
        self.down_proj = RowParallelLinear(ctx, inner, hidden, config.mlp_bias)
        self.act = gated_activation(config.hidden_act, ctx)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self.gate_up_proj.slots(prefix) | self.down_proj.slots(f"{prefix}.down_proj")

    def finish(self) -> None:
        self.gate_up_proj.finish()
        self.down_proj.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, layer_index: int, cos_sin: Tensor) -> None:
        heads, head_dim = config.num_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            ctx, config.hidden_size, head_dim, heads, config.num_kv_heads, bias=config.qkv_bias
        )
        self.o_proj = RowParallelLinear(ctx, heads * head_dim, config.hidden_size, bias=config.attention_output_bias)
        self.attend = Attention(
            ctx, layer_index, scale=head_dim**-0.5, cos_sin=cos_sin, sliding_window=config.sliding_window
        )

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self.qkv_proj.slots(prefix) | self.o_proj.slots(f"{prefix}.o_proj")

    def finish(self) -> None:
        self.qkv_proj.finish()
        self.o_proj.finish()

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        q, k, v = self.qkv_proj.split_heads(self.qkv_proj(x))
        return self.o_proj(self.attend(q, k, v, ctx).flatten(1))


class LlamaDecoderLayer:
    """Attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, layer_index: int, cos_sin: Tensor) -> None:
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, ctx, layer_index, cos_sin)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config, ctx)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return (
            self.input_layernorm.slots(f"{prefix}.input_layernorm")
            | self.self_attn.slots(f"{prefix}.self_attn")
            | self.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm")
            | self.mlp.slots(f"{prefix}.mlp")
        )

    def finish(self) -> None:
        self.self_attn.finish()
        self.mlp.finish()

    def __call__(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x: what is to be added to the residual stream next; the norms do it on their way."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, ctx), residual)
        return self.mlp(x), residual


class LlamaForCausalLM(CausalLM):
    """Llama and every model that differs from it only in numbers."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, max_model_len: int) -> None:
        self.config = config
        self.ctx = ctx
        cos_sin = build_cos_sin(config.rope, config.head_dim, max_model_len)
        self.embed_tokens = VocabParallelEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.layers = [LlamaDecoderLayer(config, ctx, index, cos_sin) for index in range(config.num_layers)]
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(ctx, config.vocab_size, config.hidden_size, tied_to)

    def slots(self) -> dict[str, WeightSlot]:
        slots = self.embed_tokens.slots("model.embed_tokens") | self.norm.slots("model.norm")
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}")
        return slots | self.lm_head.slots("lm_head")

    def finish(self) -> None:
        for layer in self.layers:
            layer.finish()
        self.lm_head.finish()

    def kv_cache_specs(self, kv_dtype: str) -> list[KVCacheSpec]:
        num_kv_heads, _ = kv_heads_of_rank(self.ctx, self.config.num_kv_heads)
        head_dim = self.config.head_dim
        spec = KVCacheSpec(num_kv_heads=num_kv_heads, head_dim_k=head_dim, head_dim_v=head_dim, dtype=kv_dtype)
        return [spec] * self.config.num_layers

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: the window is `ModelConfig.sliding_window`."""
