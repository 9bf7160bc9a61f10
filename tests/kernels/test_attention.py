"""The native paged attention against attention written out in float64, and against the reference platform."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

from kernels.attention_cases import DTYPES, ISAS, Shape, World, attention, kernels_as_before, native

from octavo.errors import InvalidInput
from octavo.ops.interface import KVCache
from octavo.ops.reference import ReferencePlatform
from octavo.protocol.kv_cache_spec import KVCacheSpec

__all__ = ["kernels_as_before"]
REFERENCE = ReferencePlatform()

shapes = st.builds(
    Shape,
    block_size=st.sampled_from([8, 16, 24, 32, 64, 128]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 9, 70]),
    dk=st.sampled_from([8, 16, 24, 64, 72, 128]),
    dv=st.sampled_from([8, 16, 40, 64, 72, 104, 128]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 400),
    soft_cap=st.none() | st.floats(0.5, 50),
    has_sinks=st.booleans(),
)
requests = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 40)), min_size=1, max_size=4)


def assert_near(out, expected):
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=3e-5)


@settings(max_examples=120, deadline=None)
@given(shape=shapes, requests=requests, isa=st.sampled_from(ISAS), threads=st.integers(1, 3), seed=st.integers(0, 999))
def test_any_shape_agrees_with_float64(shape, requests, isa, threads, seed):
    native.use_isa(isa)
    native.set_num_threads(threads)
    world = World(shape, [old + new for old, new in requests], seed)
    step = [(row, old, new) for row, (old, new) in enumerate(requests)]
    for out, entry in zip(world.attend(step), step, strict=True):
        if entry[2]:
            assert_near(out, world.expected(*entry))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
def test_a_long_prefill_and_long_decodes_agree_with_float64(isa, dtype, group):
    native.use_isa(isa)
    native.set_num_threads(2)
    world = World(Shape(dtype=dtype, group=group, dk=64, dv=64), [700, 1500, 513])
    step = [(0, 300, 400), (1, 1499, 1), (2, 510, 3)]
    for out, entry in zip(world.attend(step), step, strict=True):
        assert_near(out, world.expected(*entry))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"soft_cap": 3.0}, {"has_sinks": True}])
def test_it_agrees_with_the_reference_platform(dtype, options):
    world = World(Shape(dtype=dtype, **options), [90, 300, 33])
    s, step = world.shape, [(0, 0, 90), (1, 299, 1), (2, 20, 13)]
    spec = KVCacheSpec(num_kv_heads=s.num_kv_heads, head_dim_k=s.dk, head_dim_v=s.dv, dtype=dtype)
    cache = REFERENCE.allocate_kv_cache(spec, world.num_blocks, s.block_size)
    for row, n in enumerate(world.lengths):
        REFERENCE.write_kv(world.k[row], world.v[row], cache, world.slots(row, 0, n))
    q = torch.cat([world.q[row][old : old + n] for row, old, n in step])
    expected = REFERENCE.paged_attention(q, cache, world.metadata(step), world.scale, s.window, s.soft_cap, world.sinks)
    torch.testing.assert_close(torch.cat(world.attend(step)), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_requests_without_tokens_and_idle_rows_change_nothing(isa):
    native.use_isa(isa)
    world = World(Shape(), [40, 0, 30])
    alone = world.attend([(0, 39, 1), (2, 10, 20)])
    step = [(1, 0, 0), (0, 39, 1), (0, 40, 0), (2, 10, 20), (1, 0, 0)]
    among = world.attend(step)
    assert torch.equal(alone[0], among[1])
    assert torch.equal(alone[1], among[3])
    q = torch.cat((world.q[0][39:], torch.full((5, world.shape.num_heads, world.shape.dk), torch.nan)))
    out = attention.paged_attention(q, world.cache, world.metadata([(0, 39, 1)]), world.scale)
    assert torch.equal(out[:1], alone[0])
    assert (out[1:] == 0).all()


def test_a_step_without_tokens_gives_none():
    world = World(Shape(), [5])
    assert world.attend([])[:] == ()
    assert world.attend([(0, 5, 0)])[0].shape == (0, 6, 24)


def test_queries_may_be_a_view_into_wider_rows():
    world = World(Shape(), [50])
    wide = torch.full((50, world.shape.num_heads + 5, world.shape.dk), torch.nan)
    wide[:, 2:-3] = world.q[0]
    metadata = world.metadata([(0, 0, 50)])
    out = attention.paged_attention(wide[:, 2:-3], world.cache, metadata, world.scale)
    assert torch.equal(out, world.attend([(0, 0, 50)])[0])


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_or_infinite_key_reaches_only_the_tokens_that_see_it(isa):
    native.use_isa(isa)
    clean = World(Shape(window=40), [200])
    broken = World(Shape(window=40), [200])
    for position, value in ((60, torch.nan), (120, torch.inf)):
        k, v = clean.k[0][position : position + 1].clone(), clean.v[0][position : position + 1].clone()
        attention.write_kv(k * value, v * value, broken.cache, broken.slots(0, position, position + 1))
    before, after = clean.attend([(0, 0, 200)])[0], broken.attend([(0, 0, 200)])[0]
    touched = torch.zeros(200, dtype=torch.bool)
    touched[60:100] = touched[120:160] = True
    assert torch.equal(before[~touched], after[~touched])
    assert after[60:100].isnan().all()
    assert not after[120:160].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_scores_hundreds_apart_neither_overflow_nor_vanish(isa, threads):
    native.use_isa(isa)
    native.set_num_threads(threads)
    world = World(Shape(num_kv_heads=1, has_sinks=True), [1200])
    world.scale *= 100
    for entry in ((0, 1199, 1), (0, 500, 60)):
        out = world.attend([entry])[0].double()
        torch.testing.assert_close(out, world.expected(*entry), rtol=1e-3, atol=1e-3)


def test_the_plan_is_made_once_a_step_and_shape():
    world = World(Shape(), [40])
    metadata = world.metadata([(0, 39, 1)])
    for _ in range(3):
        world.attend([(0, 39, 1)], metadata)
    assert len(metadata.plans) == 1
    attention.paged_attention(world.q[0][39:], world.cache, metadata, world.scale, 8)
    assert len(metadata.plans) == 2


@pytest.mark.parametrize("head_dim", [4, 12, 65])
def test_a_head_size_that_is_no_multiple_of_8_is_refused(head_dim):
    for dk, dv in ((head_dim, 64), (64, head_dim)):
        spec = KVCacheSpec(num_kv_heads=1, head_dim_k=dk, head_dim_v=dv, dtype="float32")
        with pytest.raises(InvalidInput, match=f"multiples of 8.* {head_dim}"):
            attention.allocate_kv_cache(spec, 1, 16)


@pytest.mark.parametrize("block_size", [0, 4, 12, 136])
def test_a_block_size_that_the_kernels_lack_is_refused(block_size):
    spec = KVCacheSpec(num_kv_heads=1, head_dim_k=8, head_dim_v=8, dtype="float32")
    with pytest.raises(InvalidInput, match=f"block_size is {block_size}"):
        attention.allocate_kv_cache(spec, 1, block_size)


def test_metadata_that_would_lead_outside_memory_is_refused():
    world = World(Shape(), [40])
    q, cache = world.q[0][39:], world.cache

    def attend(metadata, q=q, cache=cache, **options):
        attention.paged_attention(q, cache, metadata, world.scale, **options)

    step = [(0, 39, 1)]
    for block in (-1, world.num_blocks, 2**30):
        metadata = world.metadata(step)
        metadata.block_tables[0, 1] = block
        with pytest.raises(ValueError, match="block that the cache lacks"):
            attend(metadata)
    for name, index, value in (("seq_lens", 0, 1000), ("seq_lens", 0, 0), ("query_start_loc", 1, 2)):
        metadata = world.metadata(step)
        getattr(metadata, name)[index] = value
        with pytest.raises(ValueError):
            attend(metadata)
    with pytest.raises(ValueError, match="does not fit"):
        attend(world.metadata(step), q=q[:, :5])
    with pytest.raises(ValueError, match="float32"):
        attend(world.metadata(step), q=q.bfloat16())
    with pytest.raises(ValueError, match="sinks"):
        attend(world.metadata(step), sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="not contiguous"):
        attend(world.metadata(step), cache=KVCache(cache.k[::2], cache.v[::2]))
    with pytest.raises(ValueError, match="sees at least itself"):
        attend(world.metadata(step), sliding_window=0)
