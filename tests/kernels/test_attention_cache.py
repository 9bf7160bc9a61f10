"""Rope, KV writes, block copies and the canonical form of a block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

from kernels.attention_cases import (
    DTYPES,
    ISAS,
    Shape,
    assert_guards_intact,
    attention,
    kernels_as_before,
    native,
    poisoned_cache,
    stored,
)

from octavo.errors import InvalidInput
from octavo.ops.interface import KVCache
from octavo.ops.reference import ReferencePlatform

__all__ = ["kernels_as_before"]
REFERENCE = ReferencePlatform()
quick = settings(max_examples=60, deadline=None)

shapes = st.builds(
    Shape,
    block_size=st.sampled_from([8, 16, 24, 128]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dk=st.sampled_from([8, 24, 64, 136]),
    dv=st.sampled_from([8, 40, 64]),
    dtype=st.sampled_from(DTYPES),
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(cache, shape):
    """(k [slots, G, dk], v [slots, G, dv]) of all slots, in float64, by way of the canonical form."""
    parts = ([], [])
    for block in range(len(cache.k)):
        raw = torch.frombuffer(bytearray(attention.export_block([cache], block)), dtype=torch.uint8)
        for into, dims in zip(parts, (shape.dk, shape.dv), strict=True):
            count = shape.block_size * shape.num_kv_heads
            dtype = cache.k.dtype
            values, raw = raw[: count * dims * dtype.itemsize], raw[count * dims * dtype.itemsize :]
            values = values.clone().view(dtype).double().view(shape.block_size, shape.num_kv_heads, dims)
            if dtype.itemsize == 1:
                scales, raw = raw[: count * 4], raw[count * 4 :]
                values = values * scales.clone().view(torch.float32).view(shape.block_size, -1, 1).double()
            into.append(values)
        assert len(raw) == 0 or dims == shape.dk
    return tuple(torch.cat(part) for part in parts)


@quick
@given(shape=shapes, isa=st.sampled_from(ISAS), threads=st.integers(1, 3), data=st.data())
def test_what_is_written_is_read_back_and_nothing_else_changes(shape, isa, threads, data):
    native.use_isa(isa)
    native.set_num_threads(threads)
    cache, base = poisoned_cache(shape, 5)
    num_slots = 5 * shape.block_size
    slots = torch.tensor(data.draw(st.lists(st.integers(0, num_slots - 1), unique=True)), dtype=torch.int64)
    wide = draw(len(slots), shape.num_kv_heads, shape.dk + shape.dv)
    flat = wide.flatten(1)
    k = flat[:, : shape.num_kv_heads * shape.dk].unflatten(1, (-1, shape.dk))
    v = flat[:, shape.num_kv_heads * shape.dk :].unflatten(1, (-1, shape.dv))
    attention.write_kv(k, v, cache, slots)
    keys, values = read(cache, shape)
    tolerance = {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(keys[slots], stored(k, shape.dtype), **tolerance)
    torch.testing.assert_close(values[slots], stored(v, shape.dtype), **tolerance)
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[slots] = False
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()
    assert_guards_intact(base)


@pytest.mark.parametrize("isa", ISAS)
def test_a_large_write_at_three_threads_equals_one_token_at_a_time(isa):
    native.use_isa(isa)
    for dtype in DTYPES:
        shape = Shape(dtype=dtype, dk=64, dv=64)
        k, v = draw(700, 2, 64), draw(700, 2, 64, seed=1)
        slots = torch.randperm(800, generator=torch.Generator().manual_seed(2))[:700]
        native.set_num_threads(3)
        at_once, _ = poisoned_cache(shape, 50)
        attention.write_kv(k, v, at_once, slots)
        native.set_num_threads(1)
        singly, _ = poisoned_cache(shape, 50)
        for token in range(700):
            one = slice(token, token + 1)
            attention.write_kv(k[one], v[one], singly, slots[one])
        for a, b in zip(at_once, singly, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
def test_int8_is_within_half_a_step_whatever_the_magnitude(isa):
    native.use_isa(isa)
    shape = Shape(dtype="int8", num_kv_heads=1, dk=64, dv=64)
    magnitudes = torch.tensor([1e-44, 1e-40, 1e-30, 1e-3, 1.0, 1e4, 1e30, 3e38]).view(-1, 1, 1)
    x = draw(8, 1, 64).clamp(-1, 1) * magnitudes
    x[4, 0, 5] = 0
    cache, _ = poisoned_cache(shape, 1)
    attention.write_kv(x, -x, cache, torch.arange(8))
    keys, values = read(cache, shape)
    largest = x.abs().amax(-1, keepdim=True).double()
    step = largest / 127
    assert ((keys[:8] - x.double()).abs() <= step * 0.5001 + 1.5e-43).all()
    assert torch.equal(keys[:8], -values[:8])
    # the largest value of a token and head is kept
    torch.testing.assert_close(keys[1:8].abs().amax(-1, keepdim=True), largest[1:], rtol=1e-5, atol=1e-43)
    zeros = torch.zeros(1, 1, 64)
    attention.write_kv(zeros, zeros, cache, torch.tensor([9]))
    keys, values = read(cache, shape)
    assert (keys[9] == 0).all()
    assert (values[9] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_fp8_keeps_four_bits_of_every_value_and_small_ones_beside_large_ones(isa):
    native.use_isa(isa)
    shape = Shape(dtype="fp8", num_kv_heads=1, dk=64, dv=64)
    x = draw(16, 1, 64) * torch.logspace(-30, 30, 16).view(-1, 1, 1) * torch.logspace(0, -7, 64)
    cache, _ = poisoned_cache(shape, 1)
    attention.write_kv(x, -x, cache, torch.arange(16))
    keys, values = read(cache, shape)
    smallest_step = x.abs().amax(-1, keepdim=True).double() / 448 * 2**-9
    assert ((keys - x.double()).abs() <= torch.maximum(x.abs().double() / 16, smallest_step / 2) * 1.0001).all()
    assert torch.equal(keys, -values)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_8_bits_do_not_hide_a_value_that_is_not_finite(isa, dtype, bad):
    native.use_isa(isa)
    shape = Shape(dtype=dtype, num_kv_heads=1, dk=64, dv=64)
    for place in (0, 13, 63):
        x = draw(1, 1, 64)
        x[0, 0, place] = bad
        cache, _ = poisoned_cache(shape, 1)
        attention.write_kv(x, x, cache, torch.tensor([3]))
        keys, values = read(cache, shape)
        assert not keys[3].isfinite().any()
        assert not values[3].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_s_kv_is_fixed_when_written_whatever_its_neighbours_become(dtype):
    shape = Shape(dtype=dtype)
    cache, _ = poisoned_cache(shape, 2)
    k, v = draw(32, 2, shape.dk), draw(32, 2, shape.dv)
    attention.write_kv(k, v, cache, torch.arange(32))
    before = [part[7].clone() for part in read(cache, shape)]
    others = torch.tensor([slot for slot in range(32) if slot != 7])
    attention.write_kv(k[others] * 1e3, v[others] * 1e3, cache, others)
    for a, b in zip(before, read(cache, shape), strict=True):
        assert torch.equal(a, b[7])


def test_a_slot_that_the_cache_lacks_is_refused():
    shape = Shape()
    cache, base = poisoned_cache(shape, 2)
    k, v = draw(1, 2, shape.dk), draw(1, 2, shape.dv)
    for slot in (-1, 32, 2**40):
        with pytest.raises(IndexError, match="slot"):
            attention.write_kv(k, v, cache, torch.tensor([slot]))
    with pytest.raises(ValueError, match="do not fit"):
        attention.write_kv(k[:, :1], v, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="do not fit"):
        attention.write_kv(k, v, cache, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="int64"):
        attention.write_kv(k, v, cache, torch.tensor([0], dtype=torch.int32))
    assert_guards_intact(base)


def rotated_in_float64(x, positions, cos_sin, interleaved):
    cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, -1)
    half, out = cos.shape[-1], x.double().clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x.double()[..., first], x.double()[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


@quick
@given(
    num_tokens=st.integers(0, 9),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    head_dim=st.sampled_from([8, 24, 64, 80]),
    fraction=st.floats(0, 1),
    interleaved=st.booleans(),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
)
def test_rope_agrees_with_float64(num_tokens, heads, head_dim, fraction, interleaved, isa, threads):
    native.use_isa(isa)
    native.set_num_threads(threads)
    rotated = max(2, int(head_dim * fraction) // 2 * 2)
    cos_sin = draw(50, rotated, seed=1)
    positions = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(2))
    wide = draw(num_tokens, sum(heads) + 1, head_dim)
    before = wide.clone()
    q, k = wide[:, : heads[0]], wide[:, heads[0] : -1]
    for out, x in zip(attention.rope(q, k, positions, cos_sin, interleaved), (q, k), strict=True):
        torch.testing.assert_close(
            out.double(), rotated_in_float64(x, positions, cos_sin, interleaved), rtol=1e-5, atol=1e-6
        )
    assert torch.equal(wide, before)
    for out, x in zip(
        attention.rope(q, k, positions, cos_sin, interleaved),
        REFERENCE.rope(q, k, positions, cos_sin, interleaved),
        strict=True,
    ):
        torch.testing.assert_close(out, x, rtol=1e-5, atol=1e-6)


@quick
@given(
    shape=shapes,
    num_tokens=st.integers(0, 70),
    interleaved=st.booleans(),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    partial=st.booleans(),
)
def test_rope_and_write_kv_has_the_bits_of_the_two_apart(shape, num_tokens, interleaved, isa, threads, partial):
    native.use_isa(isa)
    s = shape
    cos_sin = draw(100, s.dk // 2 if partial else s.dk, seed=1)
    sizes = [s.num_heads * s.dk, s.num_kv_heads * s.dk, s.num_kv_heads * s.dv, 5]
    qkv = draw(num_tokens, sum(sizes))
    before = qkv.clone()
    parts = [part.unflatten(1, (-1, d)) for part, d in zip(qkv.split(sizes, 1), (s.dk, s.dk, s.dv), strict=False)]
    positions = torch.arange(30, 30 + num_tokens)
    num_blocks = -(-num_tokens // s.block_size) + 1
    slots = torch.randperm(num_blocks * s.block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    apart, _ = poisoned_cache(s, num_blocks)
    q, k = attention.rope(parts[0], parts[1], positions, cos_sin, interleaved)
    attention.write_kv(k, parts[2], apart, slots)
    native.set_num_threads(threads)
    fused, base = poisoned_cache(s, num_blocks)
    out = attention.rope_and_write_kv(*parts, positions, cos_sin, fused, slots, interleaved)
    assert torch.equal(out, q)
    assert num_tokens == 0 or out.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, sizes[0] :], before[:, sizes[0] :])
    for a, b in zip(apart, fused, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert_guards_intact(base)


def test_a_position_beyond_the_table_is_refused():
    x, cos_sin = draw(1, 2, 16), draw(10, 16)
    for position in (-1, 10):
        with pytest.raises(IndexError, match="positions"):
            attention.rope(x, x, torch.tensor([position]), cos_sin)
    with pytest.raises(ValueError, match="int64"):
        attention.rope(x, x, torch.tensor([0], dtype=torch.int32), cos_sin)
    with pytest.raises(ValueError):
        attention.rope(x, x, torch.tensor([0, 1]), cos_sin)
    with pytest.raises(ValueError):
        attention.rope(x, x, torch.tensor([0]), draw(10, 18))


def filled_cache(shape, num_blocks, seed):
    cache, base = poisoned_cache(shape, num_blocks)
    slots = torch.arange(num_blocks * shape.block_size)
    k, v = draw(len(slots), shape.num_kv_heads, shape.dk, seed=seed), draw(len(slots), shape.num_kv_heads, shape.dv)
    attention.write_kv(k, v, cache, slots)
    return cache, base


@quick
@given(dtype=st.sampled_from(DTYPES), threads=st.integers(1, 3), same=st.booleans(), data=st.data())
def test_copied_blocks_hold_what_the_sources_held_before(dtype, threads, same, data):
    native.set_num_threads(threads)
    shape, num_blocks = Shape(dtype=dtype), data.draw(st.integers(1, 30))
    src, src_base = filled_cache(shape, num_blocks, 1)
    dst, dst_base = (src, src_base) if same else filled_cache(shape, num_blocks + 3, 2)
    ids = st.integers(0, num_blocks - 1)
    pairs = data.draw(st.lists(st.tuples(ids, ids), unique_by=lambda pair: pair[1]))
    expected = KVCache(dst.k.clone(), dst.v.clone())
    for source, target in pairs:
        expected.k[target], expected.v[target] = src.k[source].clone(), src.v[source].clone()
    if same:
        expected = KVCache(src.k.clone(), src.v.clone())
        originals = KVCache(src.k.clone(), src.v.clone())
        for source, target in pairs:
            expected.k[target], expected.v[target] = originals.k[source], originals.v[source]
    attention.copy_blocks(src, dst, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2))
    for a, b in zip(dst, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert_guards_intact(src_base)
    assert_guards_intact(dst_base)


def test_blocks_that_a_cache_lacks_are_not_copied():
    cache, base = filled_cache(Shape(), 3, 1)
    for pair in ([0, 3], [3, 0], [-1, 0], [0, -1]):
        with pytest.raises(IndexError, match="block"):
            attention.copy_blocks(cache, cache, torch.tensor([pair]))
    other, _ = filled_cache(Shape(dk=8), 3, 1)
    with pytest.raises(ValueError, match="differ"):
        attention.copy_blocks(cache, other, torch.tensor([[0, 0]]))
    assert_guards_intact(base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_canonical_form_is_that_of_the_reference_platform(dtype):
    shape = Shape(dtype=dtype)
    cache, _ = filled_cache(shape, 3, 1)
    k, v = read(cache, shape)
    dims = (3, shape.block_size, shape.num_kv_heads, -1)
    reference = KVCache(*(part.view(dims).to(getattr(torch, dtype)) for part in (k, v)))
    for block in range(3):
        data = attention.export_block([cache, cache], block)
        assert data == REFERENCE.export_block([reference, reference], block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 24])
def test_an_imported_block_is_the_exported_one(dtype, block_size):
    shape = Shape(dtype=dtype, block_size=block_size)
    layers = [filled_cache(shape, 3, seed) for seed in (1, 2)]
    data = attention.export_block([cache for cache, _ in layers], 1)
    fresh = [poisoned_cache(shape, 4) for _ in layers]
    attention.import_block([cache for cache, _ in fresh], 2, data)
    for (cache, _), (copy, base) in zip(layers, fresh, strict=True):
        for part, imported in zip(cache, copy, strict=True):
            assert torch.equal(part[1].view(torch.uint8), imported[2].view(torch.uint8))
            for block in (0, 1, 3):
                assert (imported[block].view(torch.uint8) == 0xFF).all()
        assert_guards_intact(base)


def test_a_block_of_another_length_is_refused():
    cache, _ = filled_cache(Shape(), 2, 1)
    data = attention.export_block([cache], 0)
    for wrong in (b"", data[:-1], data + b"x"):
        with pytest.raises(InvalidInput, match=f"takes {len(data)} bytes but {len(wrong)} were given"):
            attention.import_block([cache], 1, wrong)
