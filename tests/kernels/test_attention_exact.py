"""A token's attention has the same bits alone, in any batch, in any chunks, with shared blocks, at any thread count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

from kernels.attention_cases import DTYPES, ISAS, Shape, World, attention, chunks_of, kernels_as_before, native

__all__ = ["kernels_as_before"]

OPTIONS = ({}, {"window": 45}, {"soft_cap": 5.0, "has_sinks": True})
shapes = st.builds(
    Shape,
    block_size=st.sampled_from([8, 16, 24, 64]),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dk=st.sampled_from([8, 24, 64]),
    dv=st.sampled_from([8, 40, 64, 72]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 300),
    soft_cap=st.none() | st.just(4.0),
    has_sinks=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    length=st.integers(1, 330),
    cuts=st.lists(st.integers(1, 329), max_size=6),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_any_chunks_give_the_bits_of_one_token_at_a_time(shape, length, cuts, isa, threads, seed):
    native.use_isa(isa)
    native.set_num_threads(1)
    world = World(shape, [length, 300], seed)
    begin = max(0, length - 60)
    one_by_one = world.one_by_one(0, begin, length - begin)
    native.set_num_threads(threads)
    pieces = [world.attend([(1, 299, 1), (0, *chunk)])[1] for chunk in chunks_of(length, cuts)]
    assert torch.equal(torch.cat(pieces)[begin:], one_by_one)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    prefix=st.integers(0, 40),
    lengths=st.lists(st.integers(1, 700), min_size=2, max_size=7),
    news=st.lists(st.integers(1, 5), min_size=7, max_size=7),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_shared_blocks_give_the_bits_of_private_ones_and_of_a_request_alone(
    shape, prefix, lengths, news, isa, threads, seed
):
    native.use_isa(isa)
    native.set_num_threads(1)
    tokens = prefix * 16 // shape.block_size * shape.block_size
    lengths = [tokens + n for n in lengths]
    shared = dict.fromkeys(range(1, len(lengths)), (0, tokens))
    step = [(row, n - min(new, n), min(new, n)) for row, (n, new) in enumerate(zip(lengths, news, strict=False))]
    private = World(shape, lengths, seed, shared, reuse=False)
    alone = [private.attend([entry])[0] for entry in step]
    native.set_num_threads(threads)
    world = World(shape, lengths, seed, shared)
    for out, same, expected in zip(world.attend(step), private.attend(step), alone, strict=True):
        assert torch.equal(same, expected)
        assert torch.equal(out, expected)


def plan_of(world, step):
    metadata = world.metadata(step)
    world.attend(step, metadata)
    return next(iter(metadata.plans.values()))[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_long_decode_is_split_over_threads_and_keeps_its_bits(isa, dtype, options):
    native.use_isa(isa)
    world = World(Shape(num_kv_heads=1, dk=64, dv=64, dtype=dtype, **options), [3000])
    step, outputs = [(0, 2998, 2)], []
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        outputs.append(world.attend(step)[0])
        assert (plan_of(world, step).num_stored > 0) == (threads > 1 and "window" not in options)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0].double(), world.expected(*step[0]), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_is_computed_once_and_keeps_its_bits(isa, dtype):
    native.use_isa(isa)
    shape = Shape(dtype=dtype, group=3, dk=64, dv=64)
    lengths = [600 + 7 * row for row in range(40)]
    shared = dict.fromkeys(range(1, 39), (0, 576))
    world, private = World(shape, lengths, 3, shared), World(shape, lengths, 3, shared, reuse=False)
    step = [(row, n - 1, 1) for row, n in enumerate(lengths)]
    native.set_num_threads(1)
    outputs = [torch.cat(private.attend(step))]
    assert plan_of(private, step).num_stored == 0
    for threads in (1, 2):
        native.set_num_threads(threads)
        outputs.append(torch.cat(world.attend(step)))
        assert plan_of(world, step).num_stored == 4  # two whole partitions, each in two tiles
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[0][5], private.attend([step[5]])[0][0])


@pytest.mark.parametrize("isa", ISAS)
def test_the_ids_of_the_blocks_do_not_matter(isa):
    native.use_isa(isa)
    first, second = World(Shape(), [300, 70]), World(Shape(), [300, 70])
    order = torch.randperm(second.num_blocks, generator=torch.Generator().manual_seed(5))
    moved = attention.KVCache(torch.empty_like(second.cache.k), torch.empty_like(second.cache.v))
    pairs = torch.stack((torch.arange(len(order)), order), 1)
    attention.copy_blocks(second.cache, moved, pairs)
    second.cache, second.blocks = moved, [[int(order[b]) for b in blocks] for blocks in second.blocks]
    step = [(0, 250, 50), (1, 69, 1)]
    for a, b in zip(first.attend(step), second.attend(step), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_written_step_by_step_gives_the_bits_of_kv_written_at_once(isa, dtype):
    native.use_isa(isa)
    whole, grown = World(Shape(dtype=dtype), [280]), World(Shape(dtype=dtype), [280])
    for part in grown.cache:
        part.view(torch.uint8).fill_(0xFF)
    expected = whole.attend([(0, 0, 280)])[0]
    for begin, n in chunks_of(280, [100, 101, 230, 256]):
        end = begin + n
        attention.write_kv(grown.k[0][begin:end], grown.v[0][begin:end], grown.cache, grown.slots(0, begin, end))
        assert torch.equal(grown.attend([(0, begin, n)])[0], expected[begin:end])
