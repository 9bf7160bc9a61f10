"""The native linear layer and embeddings: near float64, and a row has the same bits whatever is computed beside it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

from octavo.ops.cpu import _native as native
from octavo.ops.cpu import linear as ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ISAS = native.supported_isas()
sizes = st.integers(1, 40) | st.sampled_from([63, 64, 65, 96, 191, 200])
depths = st.integers(1, 40) | st.sampled_from([511, 512, 513, 1024, 1300])
row_counts = st.integers(0, 30) | st.sampled_from([48, 70, 145, 300])


@pytest.fixture(autouse=True)
def kernels_as_before():
    isa, threads = native.isa(), native.num_threads()
    yield
    native.use_isa(isa)
    native.set_num_threads(threads)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x, gap):
    """x with rows `gap` elements apart, and NaN in between."""
    whole = torch.full((x.shape[0], x.shape[1] + gap), torch.nan)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


def alone(x, weight):
    """Each row by itself, on one thread."""
    threads = native.num_threads()
    native.set_num_threads(1)
    rows = [ops.linear(x[i : i + 1], weight) for i in range(x.shape[0])]
    native.set_num_threads(threads)
    return torch.cat(rows)


def assert_same_bits(a, b):
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def assert_near(y, x, weight, bias):
    expected = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, bound = expected + bias.double(), bound + bias.double().abs()
    assert y.shape == expected.shape
    assert y.dtype == torch.float32
    # the error of a sum of k products is at most about k units in the last place; it grows with the root of k
    assert ((y - expected).abs() <= 4e-7 * (1 + x.shape[1] ** 0.5) * bound + 1e-30).all()


@settings(max_examples=250, deadline=None)
@given(
    n=sizes,
    k=depths,
    rows=row_counts,
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    gap=st.integers(0, 3),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_any_shape_agrees_with_float64(n, k, rows, dtype, has_bias, gap, isa, threads, seed):
    native.use_isa(isa)
    native.set_num_threads(threads)
    weight, bias = random(n, k, seed=seed, dtype=dtype), random(n, seed=seed + 1) if has_bias else None
    x = strided(random(rows, k, seed=seed + 2), gap)
    assert_near(ops.linear(x, ops.pack_linear(weight, bias)), x, weight, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_beside_any_number_of_others(isa, dtype):
    native.use_isa(isa)
    weight = ops.pack_linear(random(203, 1100, dtype=dtype), random(203, seed=1))
    x = random(70, 1100, seed=2)
    expected = alone(x, weight)
    for rows in range(1, 71):
        assert_same_bits(ops.linear(x[:rows], weight), expected[:rows])


@settings(max_examples=100, deadline=None)
@given(
    n=sizes,
    k=depths,
    dtype=st.sampled_from(DTYPES),
    cuts=st.lists(st.integers(0, 170), max_size=4),
    gap=st.integers(0, 3),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_a_row_is_the_same_in_any_split_on_any_number_of_threads(n, k, dtype, cuts, gap, isa, threads, seed):
    native.use_isa(isa)
    native.set_num_threads(threads)
    weight = ops.pack_linear(random(n, k, seed=seed, dtype=dtype), random(n, seed=seed + 1))
    x = random(170, k, seed=seed + 2)
    edges = [0, *sorted(cuts), 170]
    parts = [ops.linear(strided(x[a:b], gap), weight) for a, b in pairwise(edges)]
    assert_same_bits(torch.cat(parts), alone(x, weight))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "rows"), [(576, 1536, 300), (2000, 576, 33), (3000, 576, 1)])
def test_threads_change_no_bit_of_a_large_product(isa, dtype, n, k, rows):
    native.use_isa(isa)
    weight, x = ops.pack_linear(random(n, k, dtype=dtype), None), random(rows, k, seed=1)
    native.set_num_threads(1)
    expected = ops.linear(x, weight)
    for threads in (2, 3):
        native.set_num_threads(threads)
        assert_same_bits(ops.linear(x, weight), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_goes_through_k_in_order_in_one_accumulator(isa, dtype):
    native.use_isa(isa)
    k, large = 1100, 2.0**24  # large + 1 rounds to large: what stands behind it is lost, what stands before it is not
    weight = ops.pack_linear(torch.ones(40, k, dtype=dtype), torch.full((40,), -large))
    for place in (0, 1, 511, 512, 733, 1099):
        x = torch.ones(30, k)
        x[:, place] = large
        before = float(torch.tensor(place + large, dtype=torch.float64).to(torch.float32))
        for rows in (1, 2, 3, 5, 12, 30):
            assert (ops.linear(x[:rows], weight) == before - large).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 13, 150])
@pytest.mark.parametrize("n", [1, 7, 31, 100, 257])
def test_nothing_is_written_beside_the_output(isa, dtype, rows, n):
    native.use_isa(isa)
    k, guard = 600, 64
    weight, x = ops.pack_linear(random(n, k, dtype=dtype), random(n, seed=1)), random(rows, k, seed=2)
    memory = torch.full((rows * n + 2 * guard,), 77.0)
    y = memory[guard:-guard].fill_(torch.nan)
    native.linear(
        *(x.data_ptr(), k, rows, weight.data.data_ptr(), weight.bias.data_ptr(), n, k, weight.storage, isa),
        y.data_ptr(),
    )
    assert_same_bits(y.view(rows, n), ops.linear(x, weight))
    assert not y.isnan().any()
    assert (memory[:guard] == 77).all()
    assert (memory[-guard:] == 77).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_not_a_number_stays_in_its_row_and_its_column(isa, dtype, rows):
    native.use_isa(isa)
    w, x = random(45, 600, dtype=dtype), random(rows, 600, seed=1)
    clean = ops.linear(x, ops.pack_linear(w, None))
    w[44, 3] = torch.nan
    x[rows - 1, 599] = torch.inf
    y = ops.linear(x, ops.pack_linear(w, None))
    assert_same_bits(y[: rows - 1, :44].contiguous(), clean[: rows - 1, :44].contiguous())
    assert y[:, 44].isnan().all()
    assert not y[rows - 1].isfinite().any()


@pytest.mark.parametrize("isa", ISAS)
def test_a_vocabulary_as_large_as_a_real_one(isa):
    native.use_isa(isa)
    native.set_num_threads(2)
    weight, x = random(49152, 64), random(3, 64, seed=1)
    packed = ops.pack_linear(weight, None)
    assert_near(ops.linear(x, packed), x, weight, None)
    ids = torch.tensor([49151, 0, 31, 32, 20000])
    assert_same_bits(ops.embedding_of_linear(ids, packed), weight[ids])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 33, 96])
def test_a_weight_is_packed_the_same_from_any_strides(isa, dtype, n):
    native.use_isa(isa)
    plain = random(n, 50, dtype=dtype)
    expected = ops.pack_linear(plain, None)
    wide = random(n, 103, seed=1, dtype=dtype)
    wide[:, 1:101:2] = plain
    for same in (plain.T.contiguous().T, wide[:, 1:101:2], torch.nn.Parameter(plain)):
        packed = ops.pack_linear(same, None)
        assert torch.equal(packed.data, expected.data)
        assert torch.equal(ops.embedding_of_linear(torch.arange(n), packed), plain.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_takes_the_weights_own_memory_and_less_than_a_panel_more(isa, dtype):
    native.use_isa(isa)
    weight = random(1000, 37, dtype=dtype)
    extra = ops.pack_linear(weight, None).data.numel() - weight.nbytes
    assert 0 <= extra < native.panel_columns() * 37 * weight.element_size()


@settings(max_examples=100, deadline=None)
@given(
    n=sizes,
    k=depths,
    ids=st.lists(st.integers(0, 10**6), max_size=60),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
)
def test_both_embeddings_return_the_stored_values_exactly(n, k, ids, dtype, isa, threads):
    native.use_isa(isa)
    native.set_num_threads(threads)
    table = random(n, k, dtype=dtype)
    ids = torch.tensor([i % n for i in ids], dtype=torch.int64)
    expected = table[ids].float()
    assert_same_bits(ops.embedding(ids, table), expected)
    assert_same_bits(ops.embedding_of_linear(ids, ops.pack_linear(table, None)), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits_becomes_its_float32(isa, dtype):
    native.use_isa(isa)
    table = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).view(256, 256)
    table = torch.where(table.isnan(), torch.tensor(1.5, dtype=dtype), table)
    ids = torch.arange(256)
    packed = ops.pack_linear(table, None)
    assert_same_bits(ops.embedding(ids, table), table.float())
    assert_same_bits(ops.embedding_of_linear(ids, packed), table.float())
    finite = torch.where(table.isfinite(), table, torch.tensor(0, dtype=dtype))
    one = torch.eye(256)  # each row picks one k, whose product and sum are exact
    for rows in (1, 256):
        assert torch.equal(ops.linear(one[:rows], ops.pack_linear(finite, None)), finite.float().T[:rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("token_id", [-1, 50, 2**40, -(2**62)])
def test_a_token_id_outside_of_the_table_is_refused(isa, token_id):
    native.use_isa(isa)
    table, ids = random(50, 8), torch.tensor([3, token_id])
    for embed in (
        lambda: ops.embedding(ids, table),
        lambda: ops.embedding_of_linear(ids, ops.pack_linear(table, None)),
    ):
        with pytest.raises(IndexError, match=f"token id {token_id} is outside of the 50 rows"):
            embed()


def test_token_ids_may_be_strided_or_none_at_all():
    table, ids = random(50, 8), torch.arange(40)[::3]
    assert torch.equal(ops.embedding(ids, table), table[ids])
    assert ops.embedding(ids[:0], table).shape == (0, 8)
    assert ops.embedding_of_linear(ids[:0], ops.pack_linear(table, None)).shape == (0, 8)


@pytest.mark.skipif(len(ISAS) < 2, reason="the machine supports one instruction set only")
def test_a_weight_packed_for_another_instruction_set_is_refused():
    native.use_isa(ISAS[0])
    weight = ops.pack_linear(random(20, 8), None)
    native.use_isa(ISAS[1])
    for use in (lambda: ops.linear(random(2, 8), weight), lambda: ops.embedding_of_linear(torch.tensor([1]), weight)):
        with pytest.raises(ValueError, match=f"packed for {ISAS[0]}, but {ISAS[1]} is in use"):
            use()


def test_what_does_not_fit_is_refused():
    weight = ops.pack_linear(random(20, 8), None)
    for x in (random(2, 7), random(2, 8).double(), random(8), random(8, 2).T, random(2, 2, 8), random(2, 8).bfloat16()):
        with pytest.raises(ValueError, match=r"x must be|rows of x must be"):
            ops.linear(x, weight)
    for matrix in (random(4, 4).double(), random(4), random(0, 4), random(4, 0), torch.ones(4, 4, dtype=torch.int8)):
        with pytest.raises(ValueError, match="cannot pack"):
            ops.pack_linear(matrix, None)
    with pytest.raises(ValueError, match="does not fit"):
        ops.pack_linear(random(4, 4), random(3))
    for ids in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match="token ids must be"):
            ops.embedding_of_linear(ids, weight)
    for table in (random(8, 4).T, random(4, 4).double(), random(4)):
        with pytest.raises(ValueError, match="cannot embed"):
            ops.embedding(torch.tensor([1]), table)


@pytest.mark.parametrize("isa", ISAS)
def test_a_weight_names_its_kernel(isa):
    native.use_isa(isa)
    names = [ops.kernel_name(ops.pack_linear(random(4, 4, dtype=dtype), None)) for dtype in DTYPES]
    assert names == [f"{isa} f32", f"{isa} bf16", f"{isa} f16"]
