"""Layers over weights in few bits, of one process and of several, against the same layers over what they stand for."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.config.engine_config import ParallelConfig
from octavo.errors import InvalidInput
from octavo.layers import embedding
from octavo.layers.context import LayerContext
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.loader.weights import load_weights
from octavo.ops.interface import QuantizedMatrix, dequantized
from octavo.ops.reference import ReferencePlatform
from octavo.quantization.groups import quantize

SIZE = pytest.mark.parametrize("size", [1, 2, 4])
BITS = pytest.mark.parametrize("bits", [8, 4])


class Recording(ReferencePlatform):
    """Notes what is packed in few bits."""

    def __init__(self):
        self.packed = []

    def pack_quantized(self, parts, bias):
        self.packed.append([part.bits for part in parts])
        return super().pack_quantized(parts, bias)


def context(rank=0, size=1, platform=None):
    parallel = ParallelConfig(tensor_parallel_size=size, tensor_parallel_rank=rank)
    return LayerContext(platform or Recording(), torch.float32, parallel)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def few(weight, bits) -> QuantizedMatrix:
    with ThreadPoolExecutor(1) as pool:
        return quantize(weight, bits, pool)


def load(layer, prefix, tensors):
    load_weights(layer.slots(prefix), tensors.items(), "test")
    layer.finish()
    return layer


def plain(tensors):
    return {name: dequantized(t) if isinstance(t, QuantizedMatrix) else t for name, t in tensors.items()}


def assert_same_layer(build, prefix, tensors, x, size=1):
    """The layer of each rank gives what it gives for the dequantised weights."""
    for rank in range(size):
        ctx = context(rank, size)
        layer, same = (load(build(c), prefix, t) for c, t in ((ctx, tensors), (context(rank, size), plain(tensors))))
        own = x.chunk(size, dim=1)[rank] if isinstance(layer, RowParallelLinear) else x
        assert ctx.platform.packed
        torch.testing.assert_close(layer(own), same(own), rtol=1e-6, atol=1e-6)


@SIZE
@BITS
def test_columns_and_rows_are_split_as_floats_are(size, bits):
    tensors = {"l.weight": few(draw(0, 16, 256), bits), "l.bias": draw(1, 16)}
    for kind in (ColumnParallelLinear, RowParallelLinear):
        assert_same_layer(lambda ctx, kind=kind: kind(ctx, 256, 16, bias=True), "l", tensors, draw(2, 3, 256), size)


@SIZE
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_parts_of_one_product_may_differ_in_bits(size, num_kv_heads):
    tensors = {
        "a.q_proj.weight": few(draw(0, 32, 64), 4),
        "a.k_proj.weight": few(draw(1, 8 * num_kv_heads, 64), 8),
        "a.v_proj.weight": few(draw(2, 8 * num_kv_heads, 64), 4),
    }
    build = lambda ctx: QKVParallelLinear(ctx, 64, 8, 4, num_kv_heads)  # noqa: E731
    assert_same_layer(build, "a", tensors, draw(3, 5, 64), size)
    ctx = context()
    load(build(ctx), "a", tensors)
    assert ctx.platform.packed == [[4, 8, 4]]


def test_a_float_part_beside_few_bits_gets_8_bits():
    up = draw(1, 12, 64)
    tensors = {"m.gate.weight": few(draw(0, 8, 64), 4), "m.up.weight": up}
    ctx, x = context(), draw(2, 3, 64)
    layer = load(MergedColumnParallelLinear(ctx, 64, {"gate": 8, "up": 12}), "m", tensors)
    assert ctx.platform.packed == [[4, 8]]
    torch.testing.assert_close(layer(x)[:, 8:], x @ dequantized(few(up, 8)).T)


def test_columns_inside_a_group_are_refused():
    with pytest.raises(InvalidInput, match="96 cannot be split into parts of 48"):
        load(RowParallelLinear(context(1, 2), 96, 8), "l", {"l.weight": few(draw(0, 8, 96), 8)})


@SIZE
@BITS
@pytest.mark.parametrize("vocab", [8, 10, 3])
def test_a_table_in_few_bits_is_looked_up_and_multiplied_by_its_shards(size, bits, vocab):
    table, hidden = few(draw(0, vocab, 64), bits), draw(1, 5, 64)
    ids, whole = torch.tensor([0, vocab - 1, 1, vocab // 2]), dequantized(table)
    looked_up, logits = 0, []
    for rank in range(size):
        embed = load(VocabParallelEmbedding(context(rank, size), vocab, 64), "e", {"e.weight": table})
        looked_up = looked_up + embed(ids)
        head = load(
            ParallelLMHead(context(rank, size), 4 * vocab, 64), "h", {"h.weight": few(draw(2, 4 * vocab, 64), bits)}
        )
        logits.append(head(hidden))
    assert torch.equal(looked_up, whole[ids])
    expected = hidden @ dequantized(few(draw(2, 4 * vocab, 64), bits)).T
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, : 4 * vocab], expected)


@pytest.mark.parametrize("head", ["none", "equal", "other", "float"])
def test_a_tied_head_shares_the_tables_packed_form_unless_the_file_s_differs(head, monkeypatch):
    warnings = []
    monkeypatch.setattr(embedding.logger, "warning", lambda message: warnings.append(message))
    weights = {"none": None, "equal": few(draw(0, 6, 64), 8), "other": few(draw(1, 6, 64), 8), "float": draw(1, 6, 64)}
    ctx, hidden = context(), draw(9, 5, 64)
    table = VocabParallelEmbedding(ctx, 6, 64)
    load_weights(table.slots("e"), [("e.weight", few(draw(0, 6, 64), 8))], "test")
    lm_head = ParallelLMHead(ctx, 6, 64, table)
    load(lm_head, "h", {} if weights[head] is None else {"h.weight": weights[head]})
    table.finish()
    used = plain({"h": weights[head] if head in ("other", "float") else few(draw(0, 6, 64), 8)})["h"]
    torch.testing.assert_close(lm_head(hidden), hidden @ used.T)
    assert torch.equal(table(torch.tensor([3])), dequantized(few(draw(0, 6, 64), 8))[3:4])
    assert len(ctx.platform.packed) == {"none": 1, "equal": 1, "other": 2, "float": 1}[head]
    assert len(warnings) == (head in ("other", "float"))
