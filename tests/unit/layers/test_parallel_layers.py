"""Layers of one process, and the shards of several put together by hand, against the same product in one piece."""

import pytest
import torch

from octavo.config.engine_config import ParallelConfig
from octavo.errors import InvalidInput
from octavo.layers import embedding
from octavo.layers.activation import gated_activation
from octavo.layers.context import LayerContext
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    kv_heads_of_rank,
)
from octavo.layers.norm import RMSNorm
from octavo.loader.weights import load_weights
from octavo.ops.reference import ReferencePlatform

BIAS = pytest.mark.parametrize("bias", [False, True])
SIZE = pytest.mark.parametrize("size", [1, 2, 4])


def context(rank=0, size=1, dtype=torch.float32):
    return LayerContext(
        ReferencePlatform(), dtype, ParallelConfig(tensor_parallel_size=size, tensor_parallel_rank=rank)
    )


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(layer, prefix, tensors):
    load_weights(layer.slots(prefix), tensors.items(), "test")
    if hasattr(layer, "finish"):
        layer.finish()
    return layer


def ranks(size, build, prefix, tensors):
    return [load(build(context(rank, size)), prefix, tensors) for rank in range(size)]


def parts(name, rows, columns, bias, seed=0):
    tensors = {f"{name}.weight": draw(seed, rows, columns)}
    return tensors | ({f"{name}.bias": draw(seed + 1, rows)} if bias else {})


def product(x, tensors, name):
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@SIZE
@BIAS
def test_column_parallel_outputs_lie_side_by_side(size, bias):
    tensors, x = parts("up", 12, 8, bias), draw(9, 5, 8)
    layers = ranks(size, lambda ctx: ColumnParallelLinear(ctx, 8, 12, bias), "up", tensors)
    outputs = [layer(x) for layer in layers]
    assert all(out.shape == (5, 12 // size) for out in outputs)
    assert_close(torch.cat(outputs, dim=1), product(x, tensors, "up"))


@SIZE
@BIAS
def test_row_parallel_outputs_add_up_and_the_bias_counts_once(size, bias):
    tensors, x = parts("down", 6, 8, bias), draw(9, 5, 8)
    layers = ranks(size, lambda ctx: RowParallelLinear(ctx, 8, 6, bias), "down", tensors)
    outputs = [layer(part) for layer, part in zip(layers, x.chunk(size, dim=1), strict=True)]
    assert_close(sum(outputs), product(x, tensors, "down"))


@SIZE
@BIAS
def test_merged_columns_keep_each_rank_s_parts_in_order(size, bias):
    tensors = parts("mlp.gate", 8, 6, bias) | parts("mlp.up", 12, 6, bias, 5)
    x = draw(9, 5, 6)
    build = lambda ctx: MergedColumnParallelLinear(ctx, 6, {"gate": 8, "up": 12}, bias)  # noqa: E731
    outputs = [layer(x).split([8 // size, 12 // size], dim=1) for layer in ranks(size, build, "mlp", tensors)]
    for index, name in enumerate(("mlp.gate", "mlp.up")):
        assert_close(torch.cat([out[index] for out in outputs], dim=1), product(x, tensors, name))


@SIZE
@BIAS
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_qkv_is_split_by_heads_and_scarce_kv_heads_are_copied(size, bias, num_kv_heads):
    head_dim = 3
    tensors = parts("attn.q_proj", 4 * head_dim, 6, bias)
    for seed, name in ((3, "attn.k_proj"), (5, "attn.v_proj")):
        tensors |= parts(name, num_kv_heads * head_dim, 6, bias, seed)
    x = draw(9, 5, 6)
    build = lambda ctx: QKVParallelLinear(ctx, 6, head_dim, 4, num_kv_heads, bias)  # noqa: E731
    q, k, v = (product(x, tensors, f"attn.{name}_proj").view(5, -1, head_dim) for name in "qkv")
    for rank, layer in enumerate(ranks(size, build, "attn", tensors)):
        heads = range(rank * 4 // size, (rank + 1) * 4 // size)
        own_q, own_k, own_v = layer.split_heads(layer(x))
        assert_close(own_q, q[:, heads])
        # Each of this rank's query heads finds the KV head it belongs to.
        group, own_group = 4 // num_kv_heads, len(heads) // own_k.shape[1]
        for own, head in enumerate(heads):
            assert_close(own_k[:, own // own_group], k[:, head // group])
            assert_close(own_v[:, own // own_group], v[:, head // group])


def test_heads_that_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(InvalidInput, match=r"num_heads=6.*tensor_parallel_size=4"):
        QKVParallelLinear(context(0, 4), 6, 2, 6, 2)
    for num_kv_heads in (6, 3):
        with pytest.raises(InvalidInput, match=rf"num_kv_heads={num_kv_heads}.*tensor_parallel_size=4"):
            kv_heads_of_rank(context(0, 4), num_kv_heads)
    with pytest.raises(InvalidInput, match=r"=5 cannot be split evenly over tensor_parallel_size=2"):
        RowParallelLinear(context(0, 2), 5, 4)


@SIZE
@pytest.mark.parametrize("vocab", [8, 10, 3])
def test_vocabulary_shards_add_up_to_the_embedding(size, vocab):
    tensors = {"embed.weight": draw(0, vocab, 4)}
    ids = torch.tensor([0, vocab - 1, 1, 1, vocab // 2])
    layers = ranks(size, lambda ctx: VocabParallelEmbedding(ctx, vocab, 4), "embed", tensors)
    assert torch.equal(sum(layer(ids) for layer in layers), tensors["embed.weight"][ids])


class Gathered:
    """Stands for a group of several: keeps what each rank sends, and returns everybody's once all have."""

    def __init__(self):
        self.sent = []

    def all_reduce(self, x):
        return x

    def all_gather(self, x):
        self.sent.append(x)
        return torch.cat(self.sent, dim=-1)


@SIZE
@pytest.mark.parametrize("vocab", [8, 10, 3])
def test_head_shards_gather_to_the_logits_without_padding(size, vocab):
    group = Gathered()
    tensors, x = {"lm_head.weight": draw(0, vocab, 4)}, draw(9, 5, 4)
    for rank in range(size):
        parallel = ParallelConfig(tensor_parallel_size=size, tensor_parallel_rank=rank)
        ctx = LayerContext(ReferencePlatform(), torch.float32, parallel, group)
        logits = load(ParallelLMHead(ctx, vocab, 4), "lm_head", tensors)(x)
    assert logits.shape == (5, vocab)
    assert_close(logits, product(x, tensors, "lm_head"))


def tied(head_weight, ctx=None):
    ctx = ctx or context()
    table = load(VocabParallelEmbedding(ctx, 6, 4), "embed", {"embed.weight": draw(0, 6, 4)})
    tensors = {} if head_weight is None else {"lm_head.weight": head_weight}
    return load(ParallelLMHead(ctx, 6, 4, table), "lm_head", tensors)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_tied_head_is_the_embedding_unless_the_file_s_head_differs_and_then_says_so(seed, monkeypatch):
    warnings = []
    monkeypatch.setattr(embedding.logger, "warning", lambda message: warnings.append(message))
    head = tied(None if seed is None else draw(seed, 6, 4))
    x = draw(9, 5, 4)
    assert_close(head(x), x @ draw(seed or 0, 6, 4).T)
    assert [("lm_head.weight differs" in message) for message in warnings] == [True] * (seed == 1)


def test_equal_heads_are_equal_on_a_shard_with_padding_rows_too(monkeypatch):
    monkeypatch.setattr(embedding.logger, "warning", lambda message: pytest.fail(message))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        tied(draw(0, 6, 4), context(rank=3, size=4))
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_untied_head_must_be_in_the_file():
    with pytest.raises(InvalidInput, match=r"missing, the first is lm_head\.weight"):
        load(ParallelLMHead(context(), 6, 4), "lm_head", {})


def test_weights_of_another_dtype_are_converted_and_logits_are_float32():
    ctx = context(dtype=torch.bfloat16)
    tensors = {"lm_head.weight": draw(0, 6, 4)}
    logits = load(ParallelLMHead(ctx, 6, 4), "lm_head", tensors)(draw(9, 5, 4).bfloat16())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, draw(9, 5, 4) @ tensors["lm_head.weight"].T, rtol=3e-2, atol=3e-2)


def test_a_tensor_of_another_shape_is_refused_by_name():
    with pytest.raises(InvalidInput, match=r"up\.weight has shape \(12, 7\), the model needs \(12, 8\)"):
        load(ColumnParallelLinear(context(0, 2), 8, 12), "up", {"up.weight": draw(0, 12, 7)})


def test_norm_alone_and_fused_with_the_addition_agree():
    norm = load(RMSNorm(context(), 8, 1e-5), "norm", {"norm.weight": draw(0, 8)})
    x, residual = draw(1, 3, 8), draw(2, 3, 8)
    normed, total = norm.add(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))


def test_an_unknown_activation_is_refused_and_the_known_ones_are_named():
    x = draw(0, 2, 6)
    assert_close(gated_activation("silu", context())(x), torch.nn.functional.silu(x[:, :3]) * x[:, 3:])
    with pytest.raises(InvalidInput, match=r"hidden_act='relu2' is not supported.*silu"):
        gated_activation("relu2", context())
