"""The simple operators against float64 formulas written out here, and the KV cache's memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.interface import DTYPES, KVCache
from octavo.ops.reference import ReferencePlatform
from octavo.protocol.kv_cache_spec import KVCacheSpec

P = ReferencePlatform()
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}

quick = settings(max_examples=25, deadline=None)
dtypes = st.sampled_from(list(DTYPES))
sizes = st.integers(1, 24)
seeds = st.integers(0, 2**32 - 1)


def draw(seed, *shape, dtype="float32"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def assert_close(got, expected, dtype):
    assert got.dtype == DTYPES[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@quick
@given(seeds, sizes, sizes, sizes, st.booleans(), dtypes)
def test_linear_is_x_times_weight_transposed_plus_bias(seed, t, n, k, with_bias, dtype):
    x, weight = draw(seed, t, k, dtype=dtype), draw(seed + 1, n, k, dtype=dtype) / math.sqrt(k)
    bias = draw(seed + 2, n, dtype=dtype) if with_bias else None
    expected = torch.einsum("tk,nk->tn", x.double(), weight.double()) + (bias.double() if with_bias else 0)
    assert_close(P.linear(x, P.pack_linear(weight, bias)), expected, dtype)


@quick
@given(seeds, sizes, sizes, dtypes)
def test_embedding_takes_rows_of_the_table(seed, t, vocab, dtype):
    table = draw(seed, vocab, 5, dtype=dtype)
    ids = torch.randint(vocab, (t,), generator=torch.Generator().manual_seed(seed))
    got = P.embedding(ids, table)
    assert all(torch.equal(got[i], table[ids[i]]) for i in range(t))


def norm64(x, weight, eps):
    x = x.double()
    return torch.stack([row / math.sqrt(sum(v * v for v in row.tolist()) / len(row) + eps) for row in x]) * weight


@quick
@given(seeds, sizes, sizes, dtypes, st.sampled_from([1e-6, 1e-5, 0.5]))
def test_rms_norm_divides_by_the_root_mean_square(seed, t, n, dtype, eps):
    x, weight = draw(seed, t, n, dtype=dtype), draw(seed + 1, n, dtype=dtype)
    assert_close(P.rms_norm(x, weight, eps), norm64(x, weight.double(), eps), dtype)


@quick
@given(seeds, sizes, sizes, dtypes)
def test_fused_add_rms_norm_gives_the_norm_of_the_sum_and_the_sum(seed, t, n, dtype):
    x, residual, weight = (draw(seed + i, t, n, dtype=dtype) for i in range(3))
    normed, total = P.fused_add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, norm64(total, weight[0].double(), 1e-6), dtype)


def test_rms_norm_of_large_half_precision_values_does_not_overflow():
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    assert_close(P.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones(1, 8).double(), "float16")


@quick
@given(seeds, sizes, sizes, dtypes)
def test_silu_and_mul_gates_the_second_half_with_the_first(seed, t, n, dtype):
    x = draw(seed, t, 2 * n, dtype=dtype)
    gate, up = x.double()[:, :n], x.double()[:, n:]
    assert_close(P.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)


@quick
@given(seeds, sizes, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), dtypes)
def test_rope_turns_each_pair_by_its_angle_and_keeps_the_rest(seed, t, h, g, half, kept, dtype):
    positions = torch.randint(0, 10, (t,), generator=torch.Generator().manual_seed(seed))
    angles = draw(seed, 10, half)
    dim = 2 * half + kept
    q, k = draw(seed + 1, t, h, dim, dtype=dtype), draw(seed + 2, t, g, dim, dtype=dtype)
    rotated = P.rope(q, k, positions, torch.cat((angles.cos(), angles.sin()), dim=1))
    for before, after in zip((q, k), rotated, strict=True):
        # As complex numbers, a rotation is one product.
        pairs = torch.complex(before[..., :half].double(), before[..., half : 2 * half].double())
        turned = pairs * torch.polar(torch.ones(()).double(), angles.double())[positions].unsqueeze(1)
        expected = torch.cat((turned.real, turned.imag, before[..., 2 * half :].double()), dim=-1)
        assert_close(after, expected, dtype)


def small_cache(dtype="float32", dk=3, dv=5, blocks=6, block_size=4, g=2):
    spec = KVCacheSpec(num_kv_heads=g, head_dim_k=dk, head_dim_v=dv, dtype=dtype)
    cache = P.allocate_kv_cache(spec, blocks, block_size)
    for part in cache:
        part.copy_(draw(0, *part.shape))
    return spec, cache


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_block_takes_the_bytes_its_spec_says(dtype):
    spec, cache = small_cache(dtype)
    assert cache.k.nbytes + cache.v.nbytes == 6 * 4 * spec.bytes_per_token


@quick
@given(st.permutations(range(24)), st.integers(0, 24), dtypes)
def test_write_kv_fills_exactly_the_given_slots(order, count, dtype):
    _, cache = small_cache(dtype)
    before = KVCache(*(part.clone() for part in cache))
    k, v = draw(1, count, 2, 3), draw(2, count, 2, 5)
    P.write_kv(k, v, cache, torch.tensor(order[:count], dtype=torch.int64))
    for slot in range(24):
        at = (slot // 4, slot % 4)
        for part, old, new in ((cache.k, before.k, k), (cache.v, before.v, v)):
            expected = new[order.index(slot)].to(part.dtype) if slot in order[:count] else old[at]
            assert torch.equal(part[at], expected)


def test_copy_blocks_within_a_cache_reads_every_source_before_it_is_overwritten():
    _, cache = small_cache()
    before = [part.clone() for part in cache]
    P.copy_blocks(cache, cache, torch.tensor([[0, 1], [1, 2], [5, 0]]))
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part, old[[5, 0, 1, 3, 4, 5]])


def test_copy_blocks_between_caches_leaves_the_source_alone():
    _, source = small_cache()
    _, target = small_cache(blocks=3)
    before = [part.clone() for part in source]
    P.copy_blocks(source, target, torch.tensor([[5, 0], [3, 2]]))
    for part, old, new in zip(source, before, target, strict=True):
        assert torch.equal(part, old)
        assert torch.equal(new[[0, 2]], old[[5, 3]])
        assert torch.equal(new[1], old[1])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_an_exported_block_comes_back_in_another_place_bit_for_bit(dtype):
    layers = [small_cache(dtype, dk, dv)[1] for dk, dv in ((3, 5), (4, 4))]
    data = P.export_block(layers, 2)
    before = [[part.clone() for part in layer] for layer in layers]
    P.import_block(layers, 4, data)
    for layer, old in zip(layers, before, strict=True):
        for part, old_part in zip(layer, old, strict=True):
            assert torch.equal(part[4], old_part[2])
            assert torch.equal(part[[0, 1, 2, 3, 5]], old_part[[0, 1, 2, 3, 5]])
    assert P.export_block(layers, 4) == data


def test_the_canonical_bytes_are_each_layers_k_then_v_in_row_major_order():
    layers = [small_cache()[1], small_cache(dk=2, dv=2)[1]]
    layers[1].k.add_(7)
    expected = [x for layer in layers for part in layer for x in part[3].flatten().tolist()]
    assert torch.frombuffer(bytearray(P.export_block(layers, 3)), dtype=torch.float32).tolist() == expected


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b""])
def test_a_block_of_the_wrong_length_is_refused_and_nothing_is_written(change):
    layers = [small_cache()[1]]
    data = P.export_block(layers, 2)
    before = P.export_block(layers, 4)
    with pytest.raises(ValueError, match=f"takes {len(data)} bytes but {len(change(data))}"):
        P.import_block(layers, 4, change(data))
    assert P.export_block(layers, 4) == before
